"""Chat templates: what Hugging Face's renderer offers, and nothing that leaves the sandbox."""

import base64
import datetime
from dataclasses import replace

import pytest

from checkpoints.text import chat
from checkpoints.text.chat import ChatTemplate, ChatTemplateError, ChatTemplates
from checkpoints.text.stream import following_text

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hi"}
CITY = '{"city": "Zürich", "days": [1, 2]}'
# The features of real templates: namespaces, loop controls, macros, whitespace control, tools, slices, string methods.
RICH = """\
{%- macro turn(role, text) %}[{{ role }}]{{ text }}{% endmacro -%}
{%- set ns = namespace(system='', tools=0) -%}
{%- if messages[0].role == 'system' %}
  {%- set ns.system = messages[0]['content'] %}
  {%- set messages = messages[1:] %}
{%- endif -%}
{{ bos_token }}{{ turn('system', ns.system | trim) }}
{%- if tools is defined and tools %}
  {%- for tool in tools %}<tool>{{ tool.function | tojson }}</tool>{% endfor %}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- if message.role == 'stop' %}{% break %}{% endif %}
  {%- if message.tool_calls is defined %}
    {%- for call in message.tool_calls %}
      {%- for key, value in call.function.arguments.items() -%}
        ({{ key }}={{ value if value is string else value | tojson }})
      {%- endfor %}
    {%- endfor %}
  {%- elif message.role == 'assistant' %}
    {%- generation %}{{ turn('assistant', message.content.split('</think>')[-1].strip()) }}{% endgeneration %}
  {%- else %}{{ turn(message.role, message.content) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% if not (enable_thinking | default(true)) %}<no>{% endif %}{% endif %}
"""


def render(source, messages=(USER,), **options):
    return ChatTemplate(source, SPECIAL).render(list(messages), **options)


def test_features_of_real_templates():
    messages = [
        {"role": "system", "content": " Be brief. "},
        USER,
        {"role": "skip", "content": "!"},
        {"role": "assistant", "content": "<think>hm</think> Hello"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": CITY}}]},
        {"role": "stop", "content": "!"},
        USER,
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    text = render(RICH, messages, tools=tools, enable_thinking=False)
    assert text == (
        '<s>[system]Be brief.<tool>{"name": "f", "description": "<é> & \'x\'"}</tool>[user]Hi[assistant]Hello'
        "(city=Zürich)(days=[1, 2])[assistant]<no>"
    )
    assert render(RICH, add_generation_prompt=False) == "<s>[system][user]Hi"


EMPTY_THOUGHT = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content }}|{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_template_that_shows_an_empty_thought_in_the_last_turn_continues_token_ids():
    template = ChatTemplate(EMPTY_THOUGHT, SPECIAL)
    assert following_text(template.render, [USER]) == "|[user]Hi|[assistant]"
    assert following_text(template.render, [USER], messages=[], text="") == "|[user]Hi|[assistant]"


def test_content_parts_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    joined = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    joined += "{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    assert render(joined, [{"role": "user", "content": parts}]) == "ab", "as the template itself joins them"
    text = base64.b64encode(b"x = 1").decode()
    for part, shown in (
        ({"type": "image_url", "image_url": {}}, "[image omitted]"),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "[audio omitted]"),
        ({"type": "input_file", "filename": "a.pdf", "file_data": "data:x/pdf;base64,A"}, "[file a.pdf omitted]"),
        ({"type": "file", "file": {"file_data": f"data:text/plain;base64,{text}"}}, "x = 1"),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}, "x"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}, "[image omitted]"),
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "tool_reference", "tool_name": "look"}, "[tool look]"),
        ({"image_url": {"url": "data:image/png;base64,AA=="}}, "[image omitted]"),
        ({"video": "data:video/mp4;base64,AA=="}, "[video omitted]"),
        ({"file": "a.txt", "profile": {"data": 1}}, '{"file": "a.txt", "profile": {"data": 1}}'),
        ({"at": datetime.date(2026, 1, 2)}, '{"at": "2026-01-02"}'),
    ):
        assert render("{{ messages[0].content }}", [{"role": "user", "content": [part]}]) == shown


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('refused') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LENIENT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = STRICT.replace(" and not loop.first", "")


@pytest.mark.parametrize(
    ("roles", "strict", "no_system"),
    [
        ("du", "[system]0[user]1", "[user]0\n\n1"),
        ("sdu", "[system]0\n\n1[user]2", "[user]0\n\n1\n\n2"),
        ("suasu", "[system]0[user]1[assistant]2[user]3\n\n4", "[user]0\n\n1[assistant]2[user]3\n\n4"),
        ("uasatu", "[user]0[assistant]1[user]2[assistant]3[tool]4[user]5", ...),
        ("usa", "[user]0\n\n1[assistant]2", ...),
        ("uatst", "[user]0[assistant]1[tool]2[tool]4[user]3", ...),
    ],
)
def test_system_messages_that_a_template_refuses_are_kept_in_place(roles, strict, no_system):
    names = {"u": "user", "a": "assistant", "s": "system", "d": "developer", "t": "tool"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    assert render(STRICT, messages) == strict
    assert render(NO_SYSTEM, messages) == (strict if no_system is ... else no_system)
    assert render(LENIENT, messages) == "".join(f"[{names[role]}]{i}" for i, role in enumerate(roles))


def test_a_template_whose_roles_must_alternate():
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    answer, call = {"role": "assistant", "content": "a"}, {"name": "f", "arguments": '{"b": "é"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
    for messages, text in (
        ([{"role": "system", "content": "S"}, USER, USER], "[user]S\n\nHi\n\nHi"),
        ([USER, called, {"role": "tool", "content": "r"}, answer, answer],
         '[user]Hi[assistant]f({"b": "é"})[user]r[assistant]a\n\na'),
        ([answer, USER], "[user][assistant]a[user]Hi"),
        ([USER, called, {"role": "tool", "content": ""}, USER], '[user]Hi[assistant]f({"b": "é"})[user]Hi'),
    ):  # fmt: skip
        assert render(template, messages) == text


def test_the_last_message_can_be_continued():
    messages = [USER, {"role": "assistant", "content": "1, 2, "}]
    assert render(LENIENT + "<end>", messages, continue_final_message=True) == "[user]Hi[assistant]1, 2,"
    for source, given in (("x", messages), (LENIENT, [{"role": "user", "content": None}])):
        with pytest.raises(ChatTemplateError, match="does not show the last message"):
            render(source, given, continue_final_message=True)


def test_messages_are_checked():
    with pytest.raises(ChatTemplateError, match=r"^every chat message needs a role$"):
        render("x", [{"content": "a"}])
    template = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    for arguments, shown in (
        ('{"a": "x', r'{"arguments": "{\"a\": \"x"}'), ("{}{}", '{"arguments": "{}{}"}'), (None, "{}"), ("null", "{}"),
        ("", "{}"), ("[1]", '{"arguments": "[1]"}'), (r'"{\"a\": 1}"', '{"a": 1}'), ([1], '{"arguments": [1]}'),
        (r'{"a": "\ud800"}', r'{"arguments": "{\"a\": \"\\ud800\"}"}'),
    ):  # fmt: skip
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        assert render(template, [{"role": "assistant", "content": None, "tool_calls": calls}]) == shown


def test_the_callers_messages_stay_as_they_were():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [call]}
    render("{{ messages[0].tool_calls[0].function.arguments.a }}", [message])
    assert call == {"function": {"name": "f", "arguments": '{"a": 1}'}}
    assert message["content"] == [{"type": "text", "text": "x"}]


def test_dates_and_json_layout():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ messages[0] | tojson(indent=1) }}") == '{\n "role": "user",\n "content": "Hi"\n}'


UNSAFE = "failed(?=: .*(unsafe|not allowed|undefined))"  # by the sandbox


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", UNSAFE), ("{{ messages.__class__ }}", UNSAFE),
        ("{{ raise_exception.__globals__ }}", UNSAFE), ("{{ '{0.__class__}'.format(messages) }}", UNSAFE),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", UNSAFE), ("{% set _ = messages.append(1) %}", UNSAFE),
        ("{% set _ = messages[0].update({'role': 'x'}) %}", UNSAFE), ("{{ range(10**9) | list }}", "failed"),
        ("{{ messages[7].content }}", "failed"), ("{{ 1 / 0 }}", "failed"), ("{% for x in %}", "cannot be parsed"),
        ("{{ raise_exception('System role not supported') }}", "refused the conversation"),
    ],
)  # fmt: skip
def test_failures_of_a_template_are_one_line(source, what):
    with pytest.raises(ChatTemplateError, match=rf"^the chat template {what}: [^\n]+$"):
        render(source)


def test_choosing_among_templates():
    templates = ChatTemplates({"default": "d", "tool_use": "t", "rag": "r"}, {})
    assert templates.choose(None, tools=False) is templates.choose("default", tools=False), "compiled once"
    assert templates.choose(None, tools=False).render([]) == "d"
    assert templates.choose(None, tools=True).render([]) == "t"
    assert templates.choose("rag", tools=True).render([]) == "r"
    assert templates.choose("{{ 1 + 1 }}", tools=False).render([]) == "2"
    said = "^this model has no chat template named"
    with pytest.raises(ChatTemplateError, match=rf"{said} 'x' \(it has: default, rag, tool_use\)$"):
        templates.choose("x", tools=False)
    with pytest.raises(ChatTemplateError, match=rf"{said} 'default' \(it has: none\)$"):
        ChatTemplates({}, {}).choose(None, tools=False)


NESTED = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}"
MANY = [{"role": "user", "content": "x" * 1000}] * 300


@pytest.mark.parametrize(
    ("limit", "most", "source", "said"),
    [
        ("TURNS", 10_000, NESTED, "turns of its loops"),
        ("SECONDS", 0.0, NESTED, "took more than 0 seconds"),
        ("CHARACTERS", 100_000, "{% for m in messages %}{{ m.content }}{% endfor %}", "more than 100,000 characters"),
    ],
)
def test_rendering_comes_to_an_end(monkeypatch, limit, most, source, said):
    monkeypatch.setattr(chat, f"MOST_{limit}", most)
    assert limit == "SECONDS" or render("{% for m in messages %}{{ m.content[:10] }}{% endfor %}", MANY)
    template = ChatTemplate(source, SPECIAL)
    template.roles = replace(template.roles, repeated=False)
    renderings, text = [], template._text
    monkeypatch.setattr(template, "_text", lambda *args, **rest: renderings.append(args) or text(*args, **rest))
    with pytest.raises(ChatTemplateError, match=said):
        template.render(MANY)
    assert len(renderings) == 1


def test_loops_with_all_that_loops_can_have():
    source = (
        "{% macro list(items) %}{% for i in items recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}"
        "{% endmacro %}{{ list([1, [2, 3]]) }}"
        "{% for x in [] %}{% else %}none{% endfor %}{% for x in [1, 2] if x > 1 %}{{ loop.index }}{% endfor %}"
        "{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}"
    )
    assert render(source) == "123none12"


@pytest.mark.parametrize("calls", [[5], 5, "x", [None], [[]], True])
def test_wrong_tool_calls_are_refused(calls):
    with pytest.raises(ChatTemplateError, match=r"tool.call"):
        render("{{ messages[0].tool_calls }}", [{"role": "assistant", "tool_calls": calls}])
