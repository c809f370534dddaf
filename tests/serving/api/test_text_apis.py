"""The three chat APIs, asked by their SDKs: equal answers, whole and streamed, with forms, calls and reasoning."""

import json
from dataclasses import replace

import pytest

from serving.api.http.parsing.formats import THINK
from tests.support.servers.text_clients import APIS, QUESTION, ask

pytest.importorskip("anthropic", reason="needs the anthropic SDK (the extra `test`)")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
)
SCHEMA = {
    "type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": False,
}  # fmt: skip
LOOK = {"name": "look", "description": "Looks.", "parameters": SCHEMA}

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
def test_a_form(server, api):
    answer = both(api, server, schema=SCHEMA, limit=60)
    assert isinstance(json.loads(answer.text)["deep"], bool)
    assert answer.reason == "stop"


@each_api
def test_a_call(server, api):
    answer = both(api, server, tools=[LOOK], force=True, limit=200)
    ((name, arguments),) = answer.calls
    assert (answer.text, answer.reason, name) == ("", "tool_calls", "look")
    assert isinstance(json.loads(arguments)["deep"], bool)


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
    assert form.reasoning
    call = both(api, thinking, thinking_token_budget=5, tools=[LOOK], force=True, limit=120)
    assert (call.text, call.reason, [name for name, _ in call.calls]) == ("", "tool_calls", ["look"])
    assert call.reasoning


def test_reasoning_switched_off_or_hidden(thinking):
    answer = both("messages", thinking, thinking={"type": "disabled"})
    assert (bool(answer.text), answer.reasoning) == (True, "")
    assert ask("chat/completions", thinking, include_reasoning=False).reasoning == ""


def test_reasoning_of_earlier_turns_goes_back(thinking):
    def prompt(**thought):
        turns = [*QUESTION, {"role": "assistant", "content": "It is.", **thought}, *QUESTION]
        answer = thinking.openai().chat.completions.create(model="demo", messages=turns, max_completion_tokens=1)
        return answer.usage.prompt_tokens

    assert prompt(reasoning="hm hm") == prompt(reasoning_content="hm hm") > prompt()
