"""The openai SDK against a running server: everything that an application usually does.

mamba-jax serve --model demo &
python -m benchmarks.clients.openai_sdk --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import sys

import openai

MESSAGES: list = [{"role": "user", "content": "What is the state of a recurrent model?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


def main(arguments: list[str] | None = None) -> int:
    """Asks, and prints what came; 0 if all of it made sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="-")
    options = parser.parse_args(arguments)
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    model = client.models.list().data[0].id
    print(f"model       {model}")

    text = ""
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=32, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usage = None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    print(f"streamed    {usage.completion_tokens} tokens: {text!r}")

    again = client.chat.completions.create(model=model, messages=MESSAGES, max_completion_tokens=32, temperature=0)
    assert again.choices[0].message.content == text
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached == again.usage.prompt_tokens
    print(f"once more   {cached} of {again.usage.prompt_tokens} prompt tokens came from the cache")

    scored = client.completions.create(model=model, prompt="The state of", max_tokens=2, logprobs=2, echo=True)
    assert scored.choices[0].logprobs is not None
    print(f"scored      {scored.choices[0].logprobs.token_logprobs}")

    form: dict = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    formed = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=200, temperature=0, response_format=form
    )
    assert formed.choices[0].finish_reason == "stop"
    print(f"of a form   {json.loads(formed.choices[0].message.content or '')}")

    first = client.responses.create(model=model, input="What is a state?", max_output_tokens=16, temperature=0)
    then = client.responses.create(
        model=model, input="And then?", previous_response_id=first.id, max_output_tokens=16, temperature=0
    )
    assert then.usage is not None
    print(f"went on     {then.output_text!r}, {then.usage.input_tokens} tokens of a conversation that the server kept")

    try:
        client.completions.create(model=model, prompt="x", temperature=-1)
    except openai.BadRequestError as error:
        print(f"refused     {error.body}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
