"""The traffic of a coding agent, and how many of its prompt tokens come from the cache, of those that an oracle reuses.

mamba-jax serve --model MODEL --state-block-size 256 --num-slots 34 &
python -m benchmarks.clients.agent_reuse --url http://127.0.0.1:8000

Several conversations take turns. They share tools and system text. In each turn the model thinks, calls a tool, gets
the result, thinks, and answers; the chat template may drop the thoughts of earlier turns. The oracle has kept the state
after every token, so it reuses the longest beginning that a prompt shares with any earlier prompt or answer.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

Post = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends the body of a request to `/v1/chat/completions`, and returns the answer."""


class Reuse(NamedTuple):
    """Prompt tokens of all requests, those that came from the cache, and those that an oracle would have reused."""

    prompt: int
    cached: int
    oracle: int


def shared(one: list[int], other: list[int]) -> int:
    """Returns the number of tokens at the beginning that two lists share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def words(rng: random.Random, count: int) -> str:
    """Returns so many characters of text."""
    return "".join(rng.choices(string.ascii_lowercase + " ", k=count))


def client(post: Post, scale: int = 1) -> Callable[[str, list[dict[str, Any]]], Reuse]:
    """Returns a function that asks for the next message of a conversation, and counts its tokens. All its conversations
    have the same tools and system text; `scale` multiplies the length of all texts."""
    rng, seen = random.Random(3), list[list[int]]()
    function = {"name": "run", "description": words(rng, 700 * scale), "parameters": {"type": "object"}}
    system = {"role": "system", "content": words(rng, 1500 * scale)}

    def ask(user: str, messages: list[dict[str, Any]]) -> Reuse:
        answer = post({
            "messages": [system, *messages], "tools": [{"type": "function", "function": function}], "user": user,
            "max_tokens": 8, "temperature": 0, "return_token_ids": True,
        })  # fmt: skip
        prompt, (choice,) = answer["prompt_token_ids"], answer["choices"]
        oracle = max((shared(prompt, other) for other in seen), default=0)
        seen.append(prompt + choice["token_ids"])
        return Reuse(len(prompt), answer["usage"]["prompt_tokens_details"]["cached_tokens"], oracle)

    return ask


def measured(post: Post, *, conversations: int = 8, turns: int = 6, scale: int = 1) -> tuple[Reuse, Reuse]:
    """Runs the traffic. Returns the sums of all requests, and of the first request of each conversation but the first:
    of these the oracle's part is the tools and the system text."""
    rng, ask, found, opened = random.Random(5), client(post, scale), list[Reuse](), list[Reuse]()
    histories: list[list[dict[str, Any]]] = [[] for _ in range(conversations)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history.append({"role": "user", "content": words(rng, rng.randrange(50, 400) * scale)})
            found.append(ask(str(number), history))
            if not turn and number:
                opened.append(found[-1])
            call = {"name": "run", "arguments": json.dumps({"command": words(rng, 60)})}
            thought = words(rng, 200 * scale)
            history += [
                {"role": "assistant", "content": "", "reasoning_content": thought,
                 "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": f"c{turn}", "content": words(rng, rng.randrange(50, 900) * scale)},
            ]  # fmt: skip
            found.append(ask(str(number), history))
            history.append({"role": "assistant", "content": words(rng, 120), "reasoning_content": words(rng, 150)})
    first, second = (Reuse(*map(sum, zip(Reuse(0, 0, 0), *each, strict=True))) for each in (found, opened))
    return first, second


def main(arguments: list[str] | None = None) -> int:
    """Prints the counts of a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args(arguments)

    def post(body: dict[str, Any]) -> dict[str, Any]:
        sent = urllib.request.Request(options.url + "/v1/chat/completions", json.dumps(body).encode())
        sent.add_header("content-type", "application/json")
        with urllib.request.urlopen(sent, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    whole, first = measured(post, conversations=options.conversations, turns=options.turns)
    for name, each in (("all requests", whole), ("first requests of later conversations", first)):
        print(
            f"{name}: {each.cached:,} of {each.oracle:,} tokens ({each.cached / max(1, each.oracle):.3f}) of an oracle"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
