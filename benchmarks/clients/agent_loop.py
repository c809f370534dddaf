"""An agent's loop with the openai SDK: the model must call a tool, is told what it gave, and so on until it may answer.

mamba-jax serve --model demo &
python -m benchmarks.clients.agent_loop --url http://127.0.0.1:8000 --record loop.json

What it came to with the demo model stands in `agent_loop.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import openai

TASK = "Tom has 5 apples and gets 7 more. How many?"

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]


def run(name: str, arguments: str) -> str:
    """What a tool gives."""
    given = json.loads(arguments)
    assert name == "add", name
    return str(given["a"] + given["b"])


def loop(
    client: openai.OpenAI, model: str, task: str, *, steps: int = 3, turns: list[dict[str, Any]] | None = None
) -> list[Any]:
    """The conversation: so many steps in which a tool must be called, and an answer at the end.

    To `turns` each step adds why it ended and what it used.
    """
    messages: list[Any] = [{"role": "user", "content": task}]
    for step in range(steps + 1):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="required" if step < steps else "none",
            parallel_tool_calls=False, max_completion_tokens=120, temperature=0,
        )  # fmt: skip
        said = answer.choices[0].message
        if turns is not None:
            used = answer.usage.model_dump(exclude_none=True) if answer.usage else None
            turns.append({"finish_reason": answer.choices[0].finish_reason, "usage": used})
        messages.append(said.model_dump(exclude_none=True))
        cached = answer.usage.prompt_tokens_details.cached_tokens if answer.usage else 0  # type: ignore[union-attr]
        print(
            f"{answer.usage.prompt_tokens if answer.usage else 0:4} prompt tokens, {cached:4} of them cached", end="  "
        )
        for call in said.tool_calls or ():
            result = run(call.function.name, call.function.arguments)  # type: ignore[union-attr]
            print(f"{call.function.name}({call.function.arguments}) = {result}")  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(repr(messages[-1].get("content")))
    return messages


def main(arguments: list[str] | None = None) -> int:
    """Runs the loop; 0 if it came to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--record", type=Path, help="file for the conversation and what each step used, as JSON")
    options = parser.parse_args(arguments)
    if options.record is not None and options.record.exists():
        parser.error(f"--record {options.record}: exists; give another file")
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    turns: list[dict[str, Any]] = []
    messages = loop(client, model, options.task, turns=turns)
    if options.record is not None:
        record = {"model": model, "tools": TOOLS, "messages": messages, "turns": turns}
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
