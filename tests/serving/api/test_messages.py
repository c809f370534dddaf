"""`/v1/messages`, asked by the anthropic SDK: answers, streams, calls, reasoning, errors in its form."""

import json

import pytest

from serving.api.http.apis.messages import as_chat
from serving.api.http.errors import ApiError
from serving.api.http.protocol.messages import MessagesRequest
from serving.api.http.text import check_fits
from tests.serving.api.test_reasoning_answers import thinking  # noqa: F401 - a fixture

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK (the extra `test`)")

LOOK = {
    "name": "look", "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"],
                     "additionalProperties": False},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "What is a state?"}]
GREEDY = {"temperature": 0}
"""Newer SDKs have no argument for it."""


def client(server, **options):
    return anthropic.Anthropic(base_url=server.url, **({"api_key": "-", "max_retries": 0} | options))


def ask(server, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": GREEDY} | fields
    return client(server).messages.create(**body)


def test_an_answer(server):
    answer = ask(server, system="Be brief.")
    (block,) = answer.content
    assert (answer.role, block.type, answer.stop_reason) == ("assistant", "text", "max_tokens")
    chat = server.openai().chat.completions.create(
        model="demo", max_completion_tokens=12, extra_body=GREEDY,
        messages=[{"role": "system", "content": "Be brief."}, *MESSAGES],
    )  # fmt: skip
    assert chat.choices[0].message.content == block.text
    assert answer.usage.output_tokens == 12
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    again = ask(server, system="Be brief.").usage
    assert (again.input_tokens, again.cache_read_input_tokens) == (0, chat.usage.prompt_tokens)
    stop = block.text[4:6]
    cut = ask(server, system="Be brief.", stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == block.text[: block.text.index(stop)]


def test_a_stream(server):
    whole = ask(server)
    with client(server).messages.stream(
        model="demo", messages=MESSAGES, max_tokens=12, extra_body=GREEDY
    ) as stream:  # fmt: skip
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 12
    kinds = [event.type for event in ask(server, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_a_call_and_what_it_gave(server, choice):
    choice = {**choice, "disable_parallel_tool_use": True}
    fields = {"tools": [LOOK], "tool_choice": choice, "max_tokens": 200}
    answer = ask(server, **fields)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "look", "tool_use")
    assert isinstance(call.input["deep"], bool)
    with client(server).messages.stream(
        model="demo", messages=MESSAGES, extra_body=GREEDY, **fields
    ) as stream:  # fmt: skip
        pieces = [event.delta.partial_json for event in stream if event.type == "content_block_delta"]
        assert stream.get_final_message().content[0].input == call.input
    assert len(pieces) > 2
    after = ask(server, tools=[LOOK], messages=[
        *MESSAGES,
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "nothing"}]},
    ])  # fmt: skip
    assert after.content[0].text


def test_reasoning_is_a_block_of_its_own(thinking):  # noqa: F811
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert [block.type for block in ask(thinking, thinking=budget, max_tokens=20).content] == ["thinking"]
    few = {"thinking": {"type": "enabled", "budget_tokens": 4}, "max_tokens": 30}
    answer = ask(thinking, **few)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    with client(thinking).messages.stream(
        model="demo", messages=MESSAGES, extra_body=GREEDY, **few
    ) as stream:  # fmt: skip
        assert stream.get_final_message().content[0].thinking == answer.content[0].thinking
    assert [block.type for block in ask(thinking, thinking={"type": "disabled"}).content] == ["text"]


def test_parts_as_messages():
    body = MessagesRequest.model_validate({
        "max_tokens": 5, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "top_k": 3,
        "tools": [LOOK], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "min_p": 0.1,
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "no"}]}]},
        ],
    })  # fmt: skip
    chat = as_chat(body)
    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "no"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    assert (chat.tool_choice, chat.top_k, chat.min_p, chat.max_completion_tokens) == ("none", 3, 0.1, 5)
    assert chat.chat_template_kwargs == {"enable_thinking": False}


def test_tokens_are_counted(server):
    count = client(server).messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.").input_tokens
    usage = ask(server, system="Be brief.", max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_a_form(server):
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"],
              "additionalProperties": False}  # fmt: skip
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}  # fmt: skip
    answer = server.http.post("/v1/messages", json=body).json()
    assert isinstance(json.loads(answer["content"][0]["text"])["sure"], bool)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": 0}, "BadRequestError"), ({"messages": []}, "BadRequestError"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError"), ({"extra_body": {"temperature": -1}}, "BadRequestError"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}, "BadRequestError"),
        ({"model": "other"}, "NotFoundError"), ({"messages": MESSAGES * 600}, "BadRequestError"),
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
    """Clients recognise both by these words, and then shorten the conversation."""
    for at_least in (False, True):
        with pytest.raises(ApiError) as refused:
            check_fits(600, 512, "messages", at_least=at_least)
        chat, messages = (json.loads(refused.value.body(path)) for path in ("/v1/chat/completions", "/v1/messages"))
        assert "this model's maximum context length is 512 tokens" in chat["error"]["message"]
        assert messages["type"] == "error"
        assert messages["error"]["type"] == "invalid_request_error"
        assert messages["error"]["message"] == "prompt is too long: 600 tokens > 511 maximum"
