"""Reasoning told apart from answers: in texts cut anywhere, in prompts, and in a written answer."""

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.choices import ChatWriter
from serving.api.http.apis.inputs import template_options
from serving.api.http.context import ResponseContext
from serving.api.http.generation import whole
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.formats import THINK, ReasoningCount, opening_of, reasoning_marks
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.text import TextCodec
from serving.engine.requests.output import CompletionOutput, RequestOutput
from tests.serving.api.test_text_apis import TEMPLATE
from tests.support.servers.written_calls import cut, tokenizer_with

CALL = "<tool_call>"
MESSAGES = [{"role": "user", "content": "What is a state?"}]


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
        reasoning, answer = reasoning + more.reasoning, answer + more.text
        names += [call.name for call in more.calls if call.name is not None]
    assert (reasoning, names or answer) == told


def test_what_a_template_and_a_prompt_say():
    demo = load_tokenizer("demo")
    tokenizer = demo.with_chat_template(TEMPLATE)
    assert reasoning_marks(tokenizer) == THINK
    assert reasoning_marks(demo) is reasoning_marks(None) is None
    for mark in THINK:  # one of them is enough
        assert reasoning_marks(demo.with_chat_template(f"{{{{ messages }}}}{mark}")) == THINK
    assert opening_of(tokenizer, tokenizer.encode_chat(MESSAGES), THINK) == (True, False)
    off = tokenizer.encode_chat(MESSAGES, enable_thinking=False)
    assert opening_of(tokenizer, off, THINK) == (False, True)
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
