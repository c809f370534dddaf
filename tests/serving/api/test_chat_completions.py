"""`/v1/chat/completions`, asked by the openai SDK, and the tokens of conversations."""

import pytest

from tests.support.servers.text_clients import joined

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a state?"}]


def ask(server, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 8, "temperature": 0} | fields
    return server.openai().chat.completions.create(**body)


def test_content_in_parts(server):
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    assert ask(server, messages=parts).choices == ask(server).choices


def test_the_old_name_of_the_limit(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    assert server.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_logprobs(server):
    content = ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 8
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
    text = b"".join(bytes(entry.bytes) for entry in content)  # also of tokens that are parts of characters
    assert text.decode(errors="replace") == ask(server).choices[0].message.content
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(server).choices[0].logprobs is None


@pytest.mark.parametrize("n", [1, 3])
def test_streams_say_the_same(server, n):
    fields = {"n": n, "temperature": 1.0, "seed": 5, "logprobs": True}
    whole = ask(server, **fields)
    chunks = list(ask(server, **fields, stream=True, stream_options={"include_usage": True}))
    streamed = joined(chunks, lambda choice: choice.delta.content or "", lambda found: (e.token for e in found.content))
    assert [choice.delta.role for chunk in chunks for choice in chunk.choices if choice.delta.role] == ["assistant"] * n
    usage = chunks[-1].usage
    assert usage == whole.usage.model_copy(update={"prompt_tokens_details": usage.prompt_tokens_details})
    assert not any(chunk.usage for chunk in chunks[:-1])
    for choice in whole.choices:
        tokens = [entry.token for entry in choice.logprobs.content]
        assert streamed[choice.index] == (choice.message.content, tokens, choice.finish_reason)


def test_tokens_and_back(server):
    prompt = server.http.post("/tokenize", json={"prompt": "A state", "return_token_strs": True}).json()
    assert prompt["count"] == len(prompt["tokens"]) == len(prompt["token_strs"])
    assert prompt["max_model_len"] == 512
    bare = server.http.post("/tokenize", json={"prompt": "A state", "add_special_tokens": False}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": "A state"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    chat = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["count"] == ask(server).usage.prompt_tokens
    assert server.http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert server.http.post("/tokenize", json={}).status_code == 400
