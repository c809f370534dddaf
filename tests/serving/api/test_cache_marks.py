"""Marks of the prefix cache: where clients' marks stand in a prompt, and what usage says of them."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from fastapi.exceptions import RequestValidationError

from checkpoints.tokenizer import Tokenizer
from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.text_api import TEXT_APIS
from serving.api.http.errors import ApiError, validated
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.text import TextCodec
from tests.serving.api import test_agent_requests
from tests.serving.api.test_agent_requests import CHAT, CONTEXT, MESSAGES, RESPONSES, SCHEMA, TOKENIZER, USER, opened


def item(kind, **fields):
    return {"type": kind, **fields}


def part(text, **marks):
    return item("text", text=text, **marks)


def user(*parts):
    return {"role": "user", "content": [*parts]}


def said(content):
    return {"role": "assistant", "content": content}


LONG, MORE = (" and then ".join(f"{word} {i}" for i in range(20)) for word in ("rule", "text"))
OF_ANTHROPIC, OF_OPENAI = {"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}
TOOL, USE = {"name": "f", "input_schema": SCHEMA}, item("tool_use", id="c", name="f", input={})


def marked(kind, **body):
    """The text before each mark of a prompt, after the text before the last mark, and the time of the mark."""
    job = opened(kind, **body)[0].job
    marks = sorted(job.request.cache_marks, key=lambda mark: mark.position)
    ends = [0, *(mark.position for mark in marks)]
    parts = [TOKENIZER.decode(job.prompts[0][a:b], skip_special_tokens=False) for a, b in itertools.pairwise(ends)]
    return list(zip(parts, (mark.ttl for mark in marks), strict=True))


@pytest.mark.parametrize(
    ("kind", "body", "marks"),
    [
        (CHAT, {"messages": [user(part(MORE))]}, [(f"[user]{MORE}", 600.0)]),
        (CHAT, {"messages": [
            USER, said(None) | {"tool_calls": [item("function", id="1", function={"name": "f", "arguments": "{}"})]},
            {"role": "tool", "content": MORE}]},
         [(f"[user]hi[assistant]<f {{}}>[tool]{MORE}", None)]),
        (CHAT, {"messages": [{"role": "system", "content": LONG}, user(part(MORE))]},
         [(f"[system]{LONG}[user]", 300.0), (MORE, 600.0)]),
        (CHAT, {"messages": [user(part(LONG, **OF_OPENAI), part(MORE))]},
         [(f"[user]{LONG}", 1800.0), (f"\n{MORE}", None)]),
        (CHAT, {"messages": [user(part(LONG, **OF_OPENAI), part(MORE))], "prompt_cache_options": {"ttl": "12h"}},
         [(f"[user]{LONG}", 43200.0), (f"\n{MORE}", None)]),
        (CHAT, {"messages": [{"role": "user", "content": LONG, **OF_ANTHROPIC}, {"role": "user", "content": MORE}]},
         [(f"[user]{LONG}", 300.0), (f"[user]{MORE}", None)]),
        (RESPONSES, {"input": [user(item("input_text", text=LONG, prompt_cache_breakpoint={
            "mode": "explicit", "ttl": "1h"})), USER]},
         [(f"[user]{LONG}", 3600.0), ("[user]hi", None)]),
        (MESSAGES, {"system": [part(LONG, **OF_ANTHROPIC), part(MORE)], "messages": [USER]},
         [(f"[system]{LONG}", 300.0), (f"\n{MORE}[user]", 300.0), ("hi", None)]),
        (MESSAGES, {"messages": [user(part(LONG))], "cache_control": {"type": "ephemeral", "ttl": "1h"}},
         [(f"[user]{LONG}", 3600.0)]),
        (MESSAGES, {"tools": [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}], "system": LONG},
         [(f"f;[system]{LONG}[user]", 3600.0), ("hi", None)]),
        (MESSAGES, {"messages": [user(part(LONG)), said([USE]), user(
            item("tool_result", tool_use_id="c", content=MORE, **OF_ANTHROPIC), part("so"))]},
         [(f"[user]{LONG}[assistant]<f {{}}>[tool]{MORE}", 300.0), ("[user]so", None)]),
        (MESSAGES, {"messages": [user(part(LONG)), said([part(MORE), {**USE, **OF_ANTHROPIC}]), user(part("so"))]},
         [(f"[user]{LONG}[assistant]{MORE}", 300.0), ("<f {}>[user]so", None)]),
        (CHAT, {"messages": [user(part(LONG)), said([part(MORE), item("thinking", thinking="", **OF_ANTHROPIC)]),
                             user(part("so"))]},
         [(f"[user]{LONG}[assistant]{MORE}", 300.0), ("[user]so", None)]),
    ],
)  # fmt: skip
def test_where_marks_stand(kind, body, marks):
    assert marked(kind, **body) == marks


@pytest.mark.parametrize(("field", "ttl"), [({"a": 1}, 600.0), ({}, 600.0), (5, 600.0), ({"cache_control": 5}, None)])
def test_a_clients_field_with_the_name_of_the_marks_of_tools(field, ttl):
    assert [ttl for _, ttl in marked(CHAT, messages=[user(part(MORE))], tools_cache_control=field)] == [ttl]


@pytest.mark.parametrize("name", ["text", "marks", "tokenizer", "render", "each"])
def test_template_variables_of_any_name(name):
    assert marked(CHAT, messages=[user(part(MORE, **OF_ANTHROPIC))], chat_template_kwargs={name: 1})
    kwargs = {"chat_template_kwargs": {name: 1}, "previous_token_ids": [1]}
    assert opened(CHAT, messages=[USER], **kwargs)[0].job.prompts

    for refused in ("places", "previous_token_ids"):
        with pytest.raises(RequestValidationError, match="may not set the chat template variable"):
            opened(CHAT, messages=[USER], chat_template_kwargs={refused: 1})


@pytest.mark.parametrize("content", ["", [part("")], [part("", **OF_ANTHROPIC)]])
def test_a_mark_on_an_empty_final_message_continues_nothing(content):
    api = TEXT_APIS[MESSAGES]
    body = validated(api.request, {"messages": [USER, said(content)], "max_tokens": 8, **OF_ANTHROPIC})
    assert not api.converted(body, None).continue_final_message


def test_marks_of_calls_count():
    with pytest.raises(ApiError, match="at most 4 blocks"):
        opened(MESSAGES, messages=[USER, said([{**USE, **OF_ANTHROPIC}])] * 5)


def test_how_often_a_conversation_is_rendered(monkeypatch):
    """Once, where its marks are found in the text; again for the beginning of the first turn with such variables."""
    context = replace(CONTEXT, codec=TextCodec(TOKENIZER, 4096))
    body = ChatRequest(messages=[user(part(LONG, **OF_ANTHROPIC), part(MORE))])
    rendered, render = [], Tokenizer.apply_chat_template
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda *a, **b: rendered.append(1) or render(*a, **b))
    (ids, none), counts = asyncio.run(tokenized(replace(context, marks=False), body)), []
    for _ in range(2):
        again, marks = asyncio.run(tokenized(context, body))
        assert (none, again, len(marks)) == ((), ids, 2)
        counts.append(len(rendered))
    system = {"role": "system", "content": LONG}
    for ends, number in (("abc", 4), ("aa", 3)):  # the same part twice is found by rendering
        messages = [system, user(*(part(f"{MORE} {end}", **OF_ANTHROPIC) for end in ends))]
        assert len(asyncio.run(tokenized(context, ChatRequest(messages=messages)))[1]) == number
        counts.append(len(rendered))
    assert counts == [3, 4, 5, 8]


def test_marks_where_the_template_changes_the_text_around_them():
    template = test_agent_requests.STRICT.replace("{{ m.content }}", "{{ m.content | trim }}")
    context = replace(CONTEXT, codec=TextCodec(TOKENIZER.with_chat_template(template), 4096))
    parts = [part(f"{LONG} {i} \n", **{"cache_control": {"ttl": f"{i}h"}}) for i in (1, 2)]
    marks = asyncio.run(tokenized(context, ChatRequest(messages=[user(*parts), user(part(MORE))])))[1]
    assert {mark.ttl for mark in marks} == {3600.0, 7200.0, None}


@pytest.mark.parametrize(
    ("marks", "says"),
    [([OF_ANTHROPIC] * 5, "at most 4 blocks"), ([{"cache_control": {"ttl": "soon"}}], "ttl must be like 5m"),
     ([{"prompt_cache_breakpoint": {"ttl": "25h"}}], "at most 24h")],
)  # fmt: skip
def test_marks_that_are_refused(marks, says):
    with pytest.raises(ApiError, match=says):
        opened(CHAT, messages=[user(*(part("x", **each) for each in marks))])


def test_of_openais_marks_the_last_ones_count():
    messages = [user(*(part(f"{LONG} {i}", **OF_OPENAI) for i in range(6)))]
    assert [ttl for _, ttl in marked(CHAT, messages=messages)] == [1800.0] * 4


def test_a_conversation_that_is_rendered_slowly_has_no_marks(monkeypatch):
    monkeypatch.setattr("serving.api.http.text._MARKED_SECONDS", -1.0)
    context = replace(CONTEXT, codec=TextCodec(TOKENIZER, 4096))
    assert asyncio.run(tokenized(context, ChatRequest(messages=[user(part(MORE))])))[1] == ()


def test_marks_change_no_prompt():
    plain = opened(MESSAGES, messages=[user(part("a"), part("b")), user(part("c"))])[0].job
    moved = opened(MESSAGES, messages=[user(part("a"), part("b")), user(part("c", **OF_ANTHROPIC))])[0].job
    assert plain.prompts == moved.prompts
    assert plain.request.message_digests == moved.request.message_digests


def test_usage_counts_reads_and_writes(server):
    def ask(path, mark, **fields):
        messages = [user(part(f"{path} {LONG}", **mark), part(MORE))]
        answer = server.http.post(f"/v1/{path}", json={"model": "demo", "max_tokens": 4, "messages": messages} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    first, again = (ask("messages", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}) for _ in range(2))
    written = first["cache_creation_input_tokens"]
    assert first["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": written}
    assert first["cache_read_input_tokens"] == 0 < written
    assert again["cache_read_input_tokens"] + again["input_tokens"] == written + first["input_tokens"]
    assert (again["cache_read_input_tokens"] >= written, again["cache_creation_input_tokens"]) == (True, 0)
    assert ask("messages", {}, system="no marks")["cache_creation_input_tokens"] == 0
    details = ask("chat/completions", OF_OPENAI)["prompt_tokens_details"]
    assert details["cached_tokens"] == 0 < details["cache_write_tokens"]
