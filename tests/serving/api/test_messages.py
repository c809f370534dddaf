"""`/v1/messages`, asked by the anthropic SDK: answers, streams, calls, reasoning, errors in its form."""

import json

import pytest

from serving.api.http.errors import ApiError
from serving.api.http.text import check_fits

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK (the extra `test`)")

MESSAGES = [{"role": "user", "content": "What is a state?"}]


def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0)


def ask(server, **fields):
    # Newer SDKs have no argument for the temperature.
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0}} | fields
    return client(server).messages.create(**body)


def test_stops_and_events(server):
    text = ask(server).content[0].text
    stop = text[4:6]
    cut = ask(server, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    kinds = [event.type for event in ask(server, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tokens_are_counted(server):
    count = client(server).messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.").input_tokens
    usage = ask(server, system="Be brief.", max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 0}, "BadRequestError"), ({"messages": MESSAGES * 600}, "BadRequestError"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
         "BadRequestError"),
        ({"model": "other"}, "NotFoundError"),
    ],
)  # fmt: skip
def test_errors_are_in_its_form(server, fields, error):
    with pytest.raises(getattr(anthropic, error)) as caught:
        ask(server, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/rerank", "/pooling", "/v1/audio/transcriptions"])
def test_what_there_is_not(server, path):
    answer = server.http.post(path, json={"model": "demo", "input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_supported"
    assert "generates text" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_in_the_words_of_each_api():
    """Clients recognize both by these words, and then shorten the conversation."""
    for at_least in (False, True):
        with pytest.raises(ApiError) as refused:
            check_fits(600, 512, "messages", at_least=at_least)
        chat, messages = (json.loads(refused.value.body(path)) for path in ("/v1/chat/completions", "/v1/messages"))
        for words in ("maximum context length is 512 tokens", "prompt is too long", "exceeds the context window"):
            assert words in chat["error"]["message"]
        assert messages["type"] == "error"
        assert messages["error"]["type"] == "invalid_request_error"
        assert messages["error"]["message"] == "prompt is too long: 600 tokens > 511 maximum"
