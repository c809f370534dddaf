"""The anthropic SDK against a running server: an answer, a stream, a tool that must be called, what went wrong.

mamba-jax serve --model demo &
python -m benchmarks.clients.anthropic_sdk --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import anthropic

MESSAGES: list[Any] = [{"role": "user", "content": "What is the state of a recurrent model?"}]
LOOK: Any = {
    "name": "look",
    "description": "Looks at something.",
    "input_schema": {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "required": ["deep"],
        "additionalProperties": False,
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Asks, and prints what came; 0 if all of it made sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--model", default="demo")
    options = parser.parse_args(arguments)
    client = anthropic.Anthropic(base_url=options.url, api_key=options.api_key)
    greedy = {"temperature": 0}  # newer SDKs have no argument for it
    body: dict[str, Any] = {"model": options.model, "messages": MESSAGES, "max_tokens": 32, "extra_body": greedy}

    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        usage = stream.get_final_message().usage
    print(f"streamed    {usage.output_tokens} tokens: {text!r}")

    again = client.messages.create(**body)
    assert again.content[0].text == text  # type: ignore[union-attr]
    print(f"once more   {again.usage.cache_read_input_tokens} prompt tokens came from the cache")

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(**body | {"tools": [LOOK], "tool_choice": choice, "max_tokens": 120})
    (call,) = called.content
    assert called.stop_reason == "tool_use"
    assert call.type == "tool_use"
    print(f"called      {call.name}({call.input})")
    results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing there"}]
    turns = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    after = client.messages.create(**body | {"tools": [LOOK], "messages": turns})
    print(f"and then    {after.content[0].text!r}")  # type: ignore[union-attr]
    print(f"counted     {client.messages.count_tokens(model=options.model, messages=turns).input_tokens} tokens")

    try:
        client.messages.create(**body | {"extra_body": {"temperature": -1}})
    except anthropic.BadRequestError as error:
        print(f"refused     {error.body}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
