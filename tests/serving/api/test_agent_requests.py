"""What coding agents and libraries send, in all chat APIs, to a model whose chat template refuses much."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fastapi.exceptions import RequestValidationError

from checkpoints.text.chat import ChatTemplateError
from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.responses import as_chat
from serving.api.http.apis.text_api import TEXT_APIS, open_writer
from serving.api.http.connection.streaming import ignored_header
from serving.api.http.context import ResponseContext
from serving.api.http.endpoints.tokenization import TokenizeRequest
from serving.api.http.errors import ApiError, validated
from serving.api.http.generation import ChoiceDelta, whole
from serving.api.http.parsing.formats import THINK
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.core.errors import RequestError
from serving.engine.requests.output import CompletionOutput, RequestOutput
from serving.engine.structured.grammar_trial import form_of

STRICT = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }};{% endif %}"
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] or m.role == 'system' and not "
    "loop.first %}{{ raise_exception('refused') }}{% endif %}[{{ m.role }}]{% if m.reasoning_content %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}{% endif %}"
)
TOKENIZER = load_tokenizer("demo").with_chat_template(STRICT)
CONTEXT = ResponseContext(
    TextCodec(TOKENIZER, 4096), "demo", ServerSettings.create(omit_system_lines=("day:",)), tool_calls="hermes",
    reasoning=THINK,
)  # fmt: skip
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
END = "[assistant]<think>"


def opened(kind, **body):
    """The writer of a request, and the request."""
    content = "input" if kind == RESPONSES else "messages"
    body = {content: [USER]} | ({"max_tokens": 8} if kind == MESSAGES else {}) | body
    request = validated(TEXT_APIS[kind].request, body)
    return asyncio.run(open_writer(TEXT_APIS[kind], CONTEXT, request)), request


def prompt(kind, **body):
    return TOKENIZER.decode(opened(kind, **body)[0].job.prompts[0], skip_special_tokens=False)


PROMPTS = yaml.safe_load(Path(__file__).with_name("agent_prompts.yaml").read_text())


@pytest.mark.parametrize(("kind", "body", "text"), PROMPTS)
def test_prompts(kind, body, text):
    assert prompt(kind, **body) == text


def test_a_call_that_ends_before_text_stays_whole():
    writer, _ = opened(MESSAGES, tools=[{"name": "f", "input_schema": SCHEMA}])
    begun = CompletionOutput(0, '</think><tool_call>{"name": "f", "arguments": {"a": "x')
    ended = CompletionOutput(0, '"}}</tool_call>Done.', finish_reason="stop")
    output = RequestOutput("r", None, [1], [], finished=True)
    call, text = writer.response([ChoiceDelta(0, output, piece) for piece in (begun, ended)]).content
    assert (call.input, text.text) == ({"a": "x"}, "Done.")


def test_tools_that_are_no_functions():
    function = {"type": "function", "name": "run", "parameters": SCHEMA}
    space = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "close", "parameters": SCHEMA}]}
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    writer, request = opened(
        RESPONSES, tools=[function, space, custom, {"type": "web_search"}, {"type": "local_shell"}]
    )
    assert TOKENIZER.decode(writer.job.prompts[0]).startswith("run close patch;")
    assert ignored_header(request) == {"x-ignored-fields": "tools.web_search,tools.local_shell"}
    assert prompt(RESPONSES, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"}).startswith("[user]")
    assert prompt(MESSAGES, tools=[{"type": "web_search_20250305", "name": "web_search"}]).startswith("[user]")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}, {"type": "mcp"}]}
    tools = [function, custom, {"type": "mcp", "server_label": "x"}]
    assert prompt(RESPONSES, tools=tools, tool_choice=allowed).startswith("run;[user]")
    assert prompt(RESPONSES, tools=tools, tool_choice={**allowed, "tools": [{"type": "mcp"}]}).startswith("[user]")
    tools = [{"type": "custom", "custom": {"name": "patch"}}]
    assert prompt(CHAT, tools=tools, tool_choice={"type": "custom", "custom": {"name": "patch"}}).startswith("patch;")
    _, request = opened(MESSAGES, structured_outputs={"choice": ["x"]}, extra=1)
    assert ignored_header(request) == {"x-ignored-fields": "extra"}


def test_null_is_the_default():
    names = (
        "n stream presence_penalty frequency_penalty parallel_tool_calls logprobs min_tokens ignore_eos tools stop "
        "skip_special_tokens priority store include_reasoning add_generation_prompt text reasoning system thinking"
    )
    for kind in (CHAT, RESPONSES, MESSAGES):
        assert prompt(kind, **dict.fromkeys(names.split())) == f"[user]hi{END}"
    for kind, name, part in (
        (CHAT, "stream_options", {"include_usage": None}), (CHAT, "prompt_cache_options", {"mode": None, "ttl": None}),
        (RESPONSES, "text", {"format": None}), (RESPONSES, "text", {"format": {"type": None}}),
        (CHAT, "structured_outputs", {"json": None, "choice": ["a"], "disable_any_whitespace": False}),
    ):  # fmt: skip
        opened(kind, **{name: part}, stream=True)
    with pytest.raises(RequestError, match="disable_any_whitespace is not supported: use grammar"):
        opened(CHAT, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert opened(CHAT, logprobs=False, top_logprobs=0)[0].job.request.params.logprobs is None
    assert 0 < opened(CHAT, top_p=0)[0].job.request.params.top_p < 1e-3


def test_formats_and_tools():
    for tool in ({"name": "f", "input_schema": SCHEMA}, {"type": "custom", "name": "f", "input_schema": SCHEMA}):
        (function,) = opened(RESPONSES, tools=[tool])[1].tools
        assert (function.type, function.parameters) == ("function", SCHEMA)
        (function,) = TokenizeRequest(prompt="x", tools=[tool]).tools
        assert function.function.parameters == SCHEMA
    custom = {"type": "custom", "name": "f"}
    (plain,), (other,) = (
        as_chat(opened(RESPONSES, tools=[tool])[1], list).tools
        for tool in (custom, {**custom, "parameters": SCHEMA, "input_schema": "x"})
    )
    assert plain == other
    assert plain.function.parameters["required"] == ["input"]
    form = {"type": "json_object", "schema": SCHEMA}
    assert opened(CHAT, response_format=form)[0].job.request.params.structured_outputs.json == SCHEMA
    grammar = opened(CHAT, response_format=form, tools=TOOLS)[0].job.request.params.structured_outputs.grammar
    assert "start: calls | answer" in grammar
    choice = {"type": "function", "function": {"name": "f"}}
    named, _ = opened(CHAT, response_format=form, tools=TOOLS, tool_choice=choice)
    assert "answer" not in named.job.request.params.structured_outputs.grammar


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "uniqueItems"),
        ({"type": "object", "properties": {"not": {"type": "string", "format": "phone"}}}, "format"),
        ({"type": "string", "pattern": "^(?=a).*$", "not": {"const": "a"}}, "not,schema.pattern"),
        ({"type": "object", "if": {}, "then": {}, "dependentRequired": {"a": ["b"]}},
         "dependentRequired,schema.if,schema.then"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]}, None),
        ({"type": "string", "format": "date", "enum": [{"not": 1}, "x"]}, None),
    ],
)  # fmt: skip
def test_words_of_schemas_that_are_not_enforced_are_named(schema, words):
    header = {"x-ignored-fields": f"schema.{words}"} if words else {}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    for fields in ({"response_format": form}, {"tools": tools, "tool_choice": "required"}):
        writer, request = opened(CHAT, **fields)
        assert ignored_header(request, writer.job.ignored) == header
        outputs = writer.job.request.params.structured_outputs
        kind, value = ("json", outputs.json) if outputs.grammar is None else ("grammar", outputs.grammar)
        form_of(kind, value)
    writer, _ = opened(MESSAGES, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert ignored_header(request, writer.job.ignored) == header


def test_fields_that_change_the_output_are_not_dropped():
    for kind in (CHAT, RESPONSES, MESSAGES):
        names = "bad_words", "chat_template", "regex", "typical_p", "n_predict", "stop_regex", "random_seed"
        for name, value in (*((name, ["x"]) for name in names), ("random_seed", 0), ("max_new_tokens", 0)):
            with pytest.raises(RequestValidationError, match=f"{name} is not supported: "):
                opened(kind, **{name: value})
        opened(kind, typical_p=1, n_predict=-1, repeat_penalty=1.0, functions=[], mirostat=0, regex="", bad_words=None)
        for more in ({}, {"thinking_token_budget": None}):
            assert opened(kind, thinking_budget=3, **more)[0].job.request.params.reasoning.budget == 3
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    assert opened(MESSAGES, output_format=form)[0].job.request.params.structured_outputs.json == form["schema"]
    assert len(opened(CHAT, truncate_prompt_tokens=3)[0].job.prompts[0]) == 3
    # Stop texts count after the reasoning.
    assert opened(CHAT, stop=["e"])[0].job.request.params.stop_after == ("", "</think>")
    assert opened(CHAT, stop=["e"], enable_thinking=False)[0].job.request.params.stop_after is None


def test_a_conversation_continues_from_token_ids():
    before = [*opened(CHAT)[0].job.prompts[0], *TOKENIZER.encode("so</think>yes", add_special_tokens=False)]
    for kind, new, text in (
        (CHAT, {"messages": [{"role": "user", "content": "and?"}]}, "[user]and?"),
        (CHAT, {"messages": [{"role": "tool", "tool_call_id": c, "content": c} for c in "ab"]}, "[tool]a[tool]b"),
        (CHAT, {"messages": [{"role": "system", "content": "S"}, USER]}, "[user]S\n\nhi"),
        (RESPONSES, {"input": "and?"}, "[user]and?"), (MESSAGES, {}, "[user]hi"),
    ):  # fmt: skip
        ids = opened(kind, previous_token_ids=before, **new)[0].job.prompts[0]
        assert ids == [*before, *TOKENIZER.encode(text + END, add_special_tokens=False)]
    with pytest.raises(ApiError, match="not in the vocabulary"):
        asyncio.run(tokenized(replace(CONTEXT, vocab_size=5), ChatRequest(messages=[USER], previous_token_ids=before)))
    # The token that ends the turn is there once, whether the model has written it or not.
    plain, turns = load_tokenizer("demo"), [USER, {"role": "assistant", "content": "a"}, USER]
    whole = plain.encode_chat(turns)
    end = len(plain.encode_chat(turns[:2], add_generation_prompt=False)) - 1
    assert plain.decode(whole[end - 1 : end], skip_special_tokens=False) == "<|im_end|>"
    for size in (end, end - 1):
        assert plain.encode_chat(turns[2:], previous_token_ids=whole[:size]) == whole
    counting = plain.with_chat_template("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="cannot continue token ids"):
        counting.encode_chat(turns[2:], previous_token_ids=whole)


def answered(kind, text, reason="stop", **body):
    writer, _ = opened(kind, **body)
    output = CompletionOutput(0, text, [5], finish_reason=reason)
    return writer.response(whole([RequestOutput("r", None, [1], [output], finished=True)], writer.job)).model_dump()


def test_calls_are_read_where_tools_are_offered():
    text = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    for body, reason, told in (
        ({"tools": TOOLS}, "stop", (None, 1, "tool_calls")), ({"tools": TOOLS}, "length", (None, 1, "length")),
        ({}, "stop", (text, 0, "stop")), ({"tools": TOOLS, "tool_choice": "none"}, "stop", (text, 0, "stop")),
    ):  # fmt: skip
        (choice,) = answered(CHAT, f"so</think>{text}", reason, **body)["choices"]
        message = choice["message"]
        assert (message["content"], len(message["tool_calls"] or ()), choice["finish_reason"]) == told
    (choice,) = answered(CHAT, "</think><t", "length", tools=TOOLS, tool_choice="required")["choices"]
    assert not choice["message"]["content"]


def test_text_after_a_call_comes_after_it():
    text = '</think>so <tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call> done'
    items = answered(RESPONSES, text, tools=TOOLS)["output"]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    blocks = answered(MESSAGES, text, tools=[{"name": "f", "input_schema": SCHEMA}])["content"]
    assert [block.get("text", "").strip() for block in blocks] == ["so", "", "done"]


def test_a_custom_tool_is_called_with_its_text():
    tools = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "n", "tools": [
        {"type": "function", "name": "close"}]}]  # fmt: skip
    text = '</think><tool_call>{"name": "close", "arguments": {}}</tool_call>'
    (call,) = answered(RESPONSES, text, tools=tools)["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "close", "n")
    text = '</think><tool_call>{"name": "patch", "arguments": {"input": "a\\nb"}}</tool_call>'
    (call,) = answered(RESPONSES, text, tools=tools)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "a\nb")


def test_reasoning_can_be_sent_back():
    (block, _) = answered(MESSAGES, "so</think>yes")["content"]
    assert block["signature"]
    (thought, _) = answered(RESPONSES, "so</think>yes", include=["reasoning.encrypted_content"])["output"]
    assert "[assistant](so)" in prompt(RESPONSES, input=[USER, {**thought, "content": None}])


def test_arguments_that_are_cut_off_are_not_lost():
    text = '</think><tool_call>{"name": "f", "arguments": {"a": "x'
    for reason, stop in (("length", "max_tokens"), ("stop", "tool_use")):
        answer = answered(MESSAGES, text, reason, tools=[{"name": "f", "input_schema": SCHEMA}])
        assert (answer["content"][0]["input"], answer["stop_reason"]) == ({"a": "x"}, stop)
    for reason, arguments in (("length", '{"a": "x'), ("stop", '{"a": "x"}')):
        (choice,) = answered(CHAT, text, reason, tools=TOOLS)["choices"]
        message = choice["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
        history = [USER, {**message, "content": None}, {"role": "tool", "content": "e"}]
        assert "<f " in prompt(CHAT, messages=json.loads(json.dumps(history)))
