"""The three chat APIs, asked by their SDKs: equal answers, whole and streamed, with forms, calls and reasoning; events,
counts and errors of `/v1/messages`."""

import json
from dataclasses import replace

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.choices import ChatWriter
from serving.api.http.apis.inputs import template_options
from serving.api.http.context import ResponseContext
from serving.api.http.generation import whole
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.formats import THINK, opening_of, reasoning_counter, reasoning_marks
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.text import TextCodec
from serving.engine.requests.output import CompletionOutput, RequestOutput
from tests.support.servers.text_clients import APIS, LOOK, SCHEMA, ask
from tests.support.servers.written_calls import cut, tokenizer_with

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "What is a state?"}]

each_api = pytest.mark.parametrize("api", APIS)


@pytest.fixture
def thinking(server, monkeypatch):
    """The server with a chat template that opens reasoning."""
    tokenizer = server.context.codec.tokenizer.with_chat_template(TEMPLATE)
    monkeypatch.setattr(server.context.codec, "tokenizer", tokenizer)
    monkeypatch.setitem(server.context.__dict__, "reasoning", THINK)
    return server


def both(api, server, **fields):
    """The answer, which is the same whole and as events."""
    whole, streamed = ask(api, server, **fields), ask(api, server, stream=True, **fields)
    parts = [(name, json.loads(arguments)) for name, arguments in whole.calls]
    assert parts == [(name, json.loads(arguments)) for name, arguments in streamed.calls]
    same = {"events": 1, "calls": [], "tokens": whole.tokens}
    assert replace(streamed, **same) == replace(whole, **same)
    assert [streamed.tokens[0], streamed.tokens[2]] == [whole.tokens[0], whole.tokens[2]]
    assert streamed.events > 2
    return whole


@each_api
def test_an_answer_is_the_same_in_all_apis(server, api):
    answer = both(api, server, system="Be brief.")
    assert answer.text
    assert (answer.reason, answer.tokens[2]) == ("length", 12)
    again = ask(api, server, system="Be brief.")
    assert again.text == answer.text
    assert again.tokens[0] == again.tokens[1], "the whole prompt is cached"
    assert replace(ask("chat/completions", server, system="Be brief."), tokens=again.tokens) == again


@each_api
def test_reasoning(thinking, api):
    endless = both(api, thinking)
    assert (endless.text, endless.reason, bool(endless.reasoning)) == ("", "length", True)
    budget = both(api, thinking, thinking_token_budget=6, limit=30)
    assert budget.text
    assert budget.reasoning
    assert "think>" not in budget.text
    at_once = both(api, thinking, thinking_token_budget=0, limit=30)
    assert (bool(at_once.text), at_once.reasoning) == (True, "")
    form = both(api, thinking, thinking_token_budget=5, schema=SCHEMA, limit=100)
    assert isinstance(json.loads(form.text)["deep"], bool)
    assert (bool(form.reasoning), form.reason) == (True, "stop")
    call = both(api, thinking, thinking_token_budget=5, tools=[LOOK], force=True, limit=120)
    ((name, arguments),) = call.calls
    assert (call.text, call.reason, name, bool(call.reasoning)) == ("", "tool_calls", "look", True)
    assert isinstance(json.loads(arguments)["deep"], bool)
    assert (ask(api, thinking, include_reasoning=False).reasoning == "") == (api == "chat/completions")


CALL = "<tool_call>"


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("begun", "until", "text", "told"),
    [
        (True, None, "\nso < 5 </thin\n</think>\n\nYes </think>", ("so < 5 </thin", "Yes </think>")),
        (True, None, "never ends </thi", ("never ends </thi", "")),
        (True, None, "</think>at once", ("", "at once")),
        (False, None, "\n<think>a  b</think> c ", ("a  b", "c ")),
        (False, None, " <thanks> for it", ("", " <thanks> for it")),
        (False, None, "<thin", ("", "<thin")),
        (False, None, "no marks <think>x</think>", ("", "no marks <think>x</think>")),
        (False, None, "", ("", "")),
        # A call may end the reasoning.
        (True, CALL, "so <tool_cal\n<tool_call>f</tool_call>", ("so <tool_cal", ["f"])),
        (True, CALL, "so\n</think>\n<tool_call>f</think>", ("so", ["f"])),
        (True, CALL, "<tool_call>", ("<tool_call>", "")),
        (True, CALL, "so <tool_call", ("so <tool_call", "")),
    ],
)
def test_texts_cut_anywhere(begun, until, text, told, size):
    reader, reasoning, answer = AnswerReader(until and "ling3", marks=THINK, begun=begun), "", ""
    names = []
    for piece in (*cut(text, size), None):
        more = reader.push(piece or "", last=piece is None)
        reasoning, answer = reasoning + more.of("reasoning"), answer + more.of("text")
        names += [call.function.name for call in more.calls if call.id is not None]
    assert (reasoning, names or answer) == told


def test_what_a_template_and_a_prompt_say():
    demo = load_tokenizer("demo")
    tokenizer = demo.with_chat_template(TEMPLATE)
    assert reasoning_marks(tokenizer) == THINK
    assert reasoning_marks(demo) is reasoning_marks(None) is None
    for mark in THINK:  # one of them is enough
        assert reasoning_marks(demo.with_chat_template(f"{{{{ messages }}}}{mark}")) == THINK
    assert opening_of(tokenizer, tokenizer.encode_chat(MESSAGES), THINK) == (True, False)
    assert opening_of(tokenizer, tokenizer.encode_chat(MESSAGES, enable_thinking=False), THINK) == (False, True)
    assert opening_of(demo, demo.encode_chat(MESSAGES), THINK) == (False, False)
    assert template_options(ChatRequest(messages=MESSAGES, reasoning_effort="low"), {})["reasoning_effort"] == "low"


def test_tokens_of_reasoning_are_counted():
    tokenizer = tokenizer_with(*THINK, template=TEMPLATE)
    begin, end = (tokenizer.token_to_id(mark) for mark in THINK)
    count = reasoning_counter(tokenizer, THINK, begun=False)
    assert count([begin, 5, 6, end, 7]) == 4
    assert count([5, 6, end, 7]) == 0
    assert count([begin, 5]) == 2
    assert reasoning_counter(tokenizer, THINK, begun=True)([5, end, 7]) == 2
    count = reasoning_counter(tokenizer, THINK, begun=True, until="<think>")
    assert (count([5, begin, end, begin]), count([5, end, begin])) == (1, 2)
    assert reasoning_counter(load_tokenizer("demo"), THINK, begun=True) is None


def test_a_written_answer_with_reasoning_and_a_call():
    tokenizer = tokenizer_with(*THINK, template=TEMPLATE)
    responses = ResponseContext(TextCodec(tokenizer, 512), "demo", tool_calls="hermes", reasoning=THINK)
    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [tool]})
    writer = ChatWriter(responses, body, body, [tokenizer.encode_chat(MESSAGES)])
    assert writer.job.request.params.skip_special_tokens is False  # or the mark would not be seen
    assert writer.job.request.params.reasoning is None  # nothing to hold it to: the row need not wait for the host
    text = '<tool_call> is how.\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    output = RequestOutput("r", None, [1], [CompletionOutput(0, text, ids, finish_reason="stop")], finished=True)
    response = writer.response(whole([output], writer.job))
    (choice,) = response.choices
    assert choice.message.reasoning_content == choice.message.reasoning == "<tool_call> is how."
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls] == ["look"]
    assert response.usage.completion_tokens_details.reasoning_tokens == ids.index(tokenizer.token_to_id("</think>")) + 1


def anthropic():
    return pytest.importorskip("anthropic", reason="needs the anthropic SDK (the extra `test`)")


def client(server):
    return anthropic().Anthropic(base_url=server.url, api_key="-", max_retries=0)


def message(server, **fields):
    # Newer SDKs have no argument for the temperature.
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 12, "extra_body": {"temperature": 0}} | fields
    return client(server).messages.create(**body)


def test_stops_and_events(server):
    text = message(server).content[0].text
    stop = text[4:6]
    cut = message(server, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    kinds = [event.type for event in message(server, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_tokens_are_counted(server):
    count = client(server).messages.count_tokens(model="demo", messages=MESSAGES, system="Be brief.").input_tokens
    usage = message(server, system="Be brief.", max_tokens=1).usage
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
    with pytest.raises(getattr(anthropic(), error)) as caught:
        message(server, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["message"]
