"""Reasoning told apart from answers: in texts cut anywhere, in whole answers and in streams, with budgets and forms."""

import json

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.choices import ChatWriter
from serving.api.http.apis.inputs import template_options
from serving.api.http.context import ResponseContext
from serving.api.http.generation import whole
from serving.api.http.parsing.reasoning import THINK, ReasoningCount, ReasoningReader, opening_of, reasoning_marks
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.text import TextCodec
from serving.engine.requests.output import CompletionOutput, RequestOutput
from tests.support.written_calls import cut, tokenizer_with

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
CALL = "<tool_call>"
MESSAGES = [{"role": "user", "content": "What is a state?"}]


@pytest.fixture
def thinking(server, monkeypatch):
    """The server with a chat template that opens reasoning."""
    tokenizer = server.context.codec.tokenizer.with_chat_template(TEMPLATE)
    monkeypatch.setattr(server.context.codec, "tokenizer", tokenizer)
    monkeypatch.setitem(server.context.__dict__, "reasoning", THINK)
    return server


def ask(server, **fields):
    body = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0} | fields
    return server.openai().chat.completions.create(**body)


def collected(stream):
    """The reasoning and the content of a stream, and its last reason."""
    reasoning = content = ""
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            said = choice.delta.model_dump()
            assert said.get("reasoning") == said.get("reasoning_content")
            assert not (content and said.get("reasoning"))
            reasoning += said.get("reasoning_content") or ""
            content += said.get("content") or ""
            reason = choice.finish_reason or reason
    return reasoning, content, reason


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
        (True, CALL, "so <tool_cal\n<tool_call>f</tool_call>", ("so <tool_cal", "<tool_call>f</tool_call>")),
        (True, CALL, "so\n</think>\n<tool_call>f</think>", ("so", "<tool_call>f</think>")),
        (True, CALL, "<tool_call>", ("", "<tool_call>")),
        (True, CALL, "so <tool_call", ("so <tool_call", "")),
    ],
)
def test_texts_cut_anywhere(begun, until, text, told, size):
    reader, reasoning, answer = ReasoningReader(THINK, begun=begun, until=until), "", ""
    for piece in (*cut(text, size), None):
        more = reader.push(piece or "", last=piece is None)
        reasoning, answer = reasoning + more[0], answer + more[1]
    assert (reasoning, answer) == told


def test_what_a_template_and_a_prompt_say():
    demo = load_tokenizer("demo")
    tokenizer = demo.with_chat_template(TEMPLATE)
    assert reasoning_marks(tokenizer) == THINK
    assert reasoning_marks(demo) is reasoning_marks(None) is None
    for mark in THINK:  # one of them is enough
        assert reasoning_marks(demo.with_chat_template(f"{{{{ messages }}}}{mark}")) == THINK
    assert opening_of(tokenizer, tokenizer.encode_chat(MESSAGES), THINK) == (True, False)
    off = template_options(ChatRequest(messages=MESSAGES, reasoning_effort="none"), {})
    assert opening_of(tokenizer, tokenizer.encode_chat(MESSAGES, **off), THINK) == (False, True)
    assert opening_of(demo, demo.encode_chat(MESSAGES), THINK) == (False, False)
    assert template_options(ChatRequest(messages=MESSAGES, reasoning_effort="low"), {})["reasoning_effort"] == "low"


def test_tokens_of_reasoning_are_counted():
    tokenizer = tokenizer_with(*THINK, template=TEMPLATE)
    begin, end = (tokenizer.token_to_id(mark) for mark in THINK)
    count = ReasoningCount.of(tokenizer, THINK, begun=False)
    assert count([begin, 5, 6, end, 7]) == 4
    assert count([5, 6, end, 7]) == 0
    assert count([begin, 5]) == 2
    assert ReasoningCount(begin, end, True)([5, end, 7]) == 2
    assert ReasoningCount(begin, end, True, until=6)([5, 6, end, 6]) == 1
    assert ReasoningCount(begin, end, True, until=6)([5, end, 6]) == 2
    assert ReasoningCount.of(tokenizer, THINK, begun=True, until="<think>").until == begin
    assert ReasoningCount.of(load_tokenizer("demo"), THINK, begun=True) is None


def test_a_written_answer_with_reasoning_and_a_call():
    tokenizer = tokenizer_with(*THINK, template=TEMPLATE)
    responses = ResponseContext(TextCodec(tokenizer, 512), "demo", tool_calls="hermes", reasoning=THINK)
    tool = {"type": "function", "function": {"name": "look"}}
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": [tool]})
    writer = ChatWriter(responses, body, body, [tokenizer.encode_chat(MESSAGES)])
    assert writer.job.params.skip_special_tokens is False  # or the mark would not be seen
    assert writer.job.params.reasoning is None  # nothing to hold it to: the row need not wait for the host
    text = '<tool_call> is how.\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    output = RequestOutput("r", None, [1], [CompletionOutput(0, text, ids, finish_reason="stop")], finished=True)
    response = writer.response(whole([output], writer.tally))
    (choice,) = response.choices
    assert choice.message.reasoning_content == choice.message.reasoning == "<tool_call> is how."
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [call.function.name for call in choice.message.tool_calls] == ["look"]
    assert response.usage.completion_tokens_details.reasoning_tokens == ids.index(tokenizer.token_to_id("</think>")) + 1


def test_without_an_end_all_is_reasoning(thinking):
    answer = ask(thinking).choices[0]
    assert answer.message.content is None
    assert answer.message.reasoning_content
    assert answer.finish_reason == "length"
    assert collected(ask(thinking, stream=True)) == (answer.message.reasoning_content, "", "length")
    hidden = ask(thinking, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(hidden, "reasoning_content")


@pytest.mark.parametrize("budget", [0, 6])
def test_a_budget(thinking, budget):
    fields = {"extra_body": {"thinking_token_budget": budget}}
    answer = ask(thinking, **fields).choices[0]
    assert answer.message.content
    # Right after the mark the demo model repeats it of its own accord.
    assert budget == 0 or "think>" not in answer.message.content
    assert bool(getattr(answer.message, "reasoning", "")) == bool(budget)
    said = (getattr(answer.message, "reasoning", ""), answer.message.content, answer.finish_reason)
    assert collected(ask(thinking, stream=True, **fields)) == said


def test_a_form_begins_after_the_reasoning(thinking):
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = {"response_format": form, "extra_body": {"thinking_token_budget": 5}, "max_completion_tokens": 100}
    answer = ask(thinking, **fields).choices[0]
    assert answer.message.reasoning_content
    assert isinstance(json.loads(answer.message.content)["sure"], bool)
    reasoning, content, _ = collected(ask(thinking, stream=True, **fields))
    assert (reasoning, content) == (answer.message.reasoning_content, answer.message.content)


def test_a_call_after_the_reasoning(thinking):
    tool = {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"],
        "additionalProperties": False}}}  # fmt: skip
    answer = ask(
        thinking, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=120,
        extra_body={"thinking_token_budget": 5},
    ).choices[0]  # fmt: skip
    assert answer.finish_reason == "tool_calls"
    assert answer.message.reasoning_content
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "look"
    assert isinstance(json.loads(call.function.arguments)["deep"], bool)


def test_thinking_switched_off(thinking):
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = ask(thinking, extra_body=fields).choices[0].message
        assert message.content
        assert not hasattr(message, "reasoning_content")


def test_reasoning_of_earlier_turns_goes_back(thinking):
    def prompt(**thought):
        turns = [*MESSAGES, {"role": "assistant", "content": "It is.", **thought}, *MESSAGES]
        return ask(thinking, messages=turns, max_completion_tokens=1).usage.prompt_tokens

    assert prompt(reasoning="hm hm") == prompt(reasoning_content="hm hm") > prompt()
