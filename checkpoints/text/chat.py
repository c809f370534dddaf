"""Chat templates, which convert a conversation to the text that a model was trained to continue.

Templates are programs from the checkpoint, written for Hugging Face's `apply_chat_template`. They run in jinja2's
sandbox with the same additions: `tojson` without HTML escapes, `raise_exception`, `strftime_now`, `break`/`continue`,
and the `generation` block (which only marks text for training, so its body is kept as it is).

The client's conversation determines how long a template runs. Rendering therefore ends with an error once it exceeds a
limit of loop iterations, seconds or characters.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from checkpoints.errors import CheckpointError, listing, one_line
from checkpoints.text.parts import part_text

Message = Mapping[str, Any]

MOST_TURNS = 1_000_000
"""Maximum number of loop iterations of one rendering, all loops together."""
MOST_SECONDS = 5.0
"""Maximum time of one rendering in seconds; checked once per loop iteration."""
MOST_CHARACTERS = 64 << 20
"""Maximum length of the rendered text."""
_TURN = "turn_of_a_loop"
"""The function that every loop calls in each iteration. Templates cannot use this name otherwise."""


class ChatTemplateError(CheckpointError):
    """The template is broken, or does not accept this conversation."""


class _OverLimit(ChatTemplateError):
    """The rendering exceeded a limit."""


@dataclass(frozen=True)
class AcceptedRoles:
    """The messages that a chat template accepts, besides those of users and assistants."""

    system: bool
    """One system message at the beginning, which otherwise becomes part of the first user message."""
    developer: bool
    """The role `developer`, which otherwise becomes `system`."""
    several: bool
    """Several system messages at the beginning, which otherwise are joined."""
    later: bool
    """System messages after the beginning, which otherwise become part of the next user message."""
    repeated: bool
    """Several messages of a user in a row; otherwise `alternating` makes a conversation that the template accepts."""
    joint: str
    """Text between the parts of a message."""

    def accepted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation that the template accepts. No text is lost, and its order is kept."""
        accepted: list[Message] = []
        merged: list[str] = []  # texts of leading system messages after the first
        waiting: list[str] = []  # texts of later system messages
        leading = True  # so far there are only system messages

        def add_as_user(text: str) -> None:
            if accepted and accepted[-1]["role"] == "user":
                accepted[-1] = {**accepted[-1], "content": f"{accepted[-1].get('content') or ''}\n\n{text}"}
            else:
                accepted.append({"role": "user", "content": text})

        for message in messages:
            role = message["role"]
            if role == "developer" and not self.developer:
                role, message = "system", {**message, "role": "system"}
            text = str(message.get("content") or "")
            leading = leading and (not accepted or accepted[-1]["role"] == "system")
            if role == "system" and self.system and leading and accepted and not self.several:
                merged.append(text)
            elif role == "system" and not (self.system if leading else self.later):
                waiting.append(text)
            elif role == "user" and waiting:
                accepted.append({**message, "content": "\n\n".join([*waiting, text])})
                waiting = []
            else:
                if waiting and role == "assistant":
                    add_as_user("\n\n".join(waiting))
                    waiting = []
                accepted.append(message)
        if waiting:
            add_as_user("\n\n".join(waiting))
        if merged:
            first = str(accepted[0].get("content") or "")
            accepted[0] = {**accepted[0], "content": "\n\n".join([first, *merged])}
        return accepted


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation in which the user, who begins, and the assistant alternate: tools' results are the user's,
    and calls are text."""
    turns: list[tuple[str, list[str]]] = []
    for message in messages:
        role = message["role"] if message["role"] in ("system", "assistant") else "user"
        calls = [call["function"] for call in message.get("tool_calls") or () if "function" in call]
        written = (f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls)
        if role == "assistant" and (not turns or turns[-1][0] == "system"):
            turns.append(("user", []))
        if not turns or turns[-1][0] != role:
            turns.append((role, []))
        turns[-1][1].extend(str(text) for text in (message.get("content"), *written) if text)
    return [{"role": role, "content": "\n\n".join(texts)} for role, texts in turns]


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template's text.
        special_tokens: `bos_token`, `eos_token`, ...: variables that templates use.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self._variables = dict(special_tokens)
        try:
            self._template = _compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot be parsed: {one_line(error)}") from error

    @functools.cached_property
    def roles(self) -> AcceptedRoles:
        """What the template accepts, found by rendering small conversations once."""

        def shows(*messages: tuple[str, Any]) -> str:
            try:
                text = self._text([{"role": role, "content": content} for role, content in messages])
            except ChatTemplateError:
                return ""
            texts = (content for _, content in messages if isinstance(content, str))
            return text if all(content in text for content in texts) else ""

        turn = ("user", "first turn"), ("assistant", "first answer")
        parts = [{"type": "text", "text": text} for text in ("part one", "part two")]
        between = shows(("user", parts)).partition("part one")[2].partition("part two")
        return AcceptedRoles(
            system=bool(shows(("system", "rule one"), *turn[:1])),
            developer=bool(shows(("developer", "rule one"), *turn[:1])),
            several=bool(shows(("system", "rule one"), ("system", "rule two"), *turn[:1])),
            later=bool(shows(*turn, ("system", "rule one"), ("user", "second turn"))),
            repeated=bool(shows(*turn[:1], ("user", "second turn"))) or not shows(*turn[:1]),
            joint=between[0] if between[1] and not between[0].strip() else "\n",
        )

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Returns the prompt's text. System messages that the template refuses become part of a user's turn.

        Args:
            messages: OpenAI-style; content may be a list of parts. Parts that are not text become a short text.
            tools: JSON schemas of functions, as in OpenAI's API.
            documents: for templates that quote sources.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end with the text of the last message, for the model to continue.
            **variables: other variables of the template (for example `enable_thinking=False`).
        Raises:
            ChatTemplateError: the template rejected the conversation, failed, tried to leave the sandbox, or exceeded a
                limit.
        """
        plain = self.roles.accepted([plain_message(message, self.roles.joint) for message in messages])
        variables |= {"tools": list(tools) if tools else None, "documents": list(documents) if documents else None}
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            text = self._text(plain, **variables)
        except ChatTemplateError as error:
            if self.roles.repeated or isinstance(error, _OverLimit):
                raise
            plain = alternating(plain)
            text = self._text(plain, **variables)
        if not continue_final_message:
            return text
        final = str(plain[-1].get("content") or "").strip() if plain else ""
        before, found, _ = text.rpartition(final) if final else ("", "", "")
        if not found:
            raise ChatTemplateError("continue_final_message: the chat template does not show the last message's text")
        return before + final

    def _text(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        given = {
            "tools": None,
            "documents": None,
            **self._variables,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            _TURN: _Turns(),
        }
        pieces, length = [], 0
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise _OverLimit(f"the chat template made more than {MOST_CHARACTERS:,} characters")
            return "".join(pieces)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program and can raise anything
            raise ChatTemplateError(f"the chat template failed: {one_line(error)}") from error


class ChatTemplates:
    """The templates of a checkpoint, by name; compiled when first used."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._sources = sources
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, template: str | None, *, tools: bool) -> ChatTemplate:
        """Returns the template to use: the name or text asked for, or else `tool_use` with tools and `default` without.

        Raises:
            ChatTemplateError: there is no such template.
        """
        default = "tool_use" if tools and "tool_use" in self._sources else "default"
        name = default if template is None else template
        if name not in self._sources:
            if "{{" in name or "{%" in name:  # the caller's text is compiled each time, so that no cache grows
                return ChatTemplate(name, self._special_tokens)
            known = listing(sorted(self._sources)) or "none"
            raise ChatTemplateError(f"this model has no chat template named {name!r} (it has: {known})")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._sources[name], self._special_tokens)
        return self._compiled[name]


def plain_message(message: Message, joint: str = "\n") -> dict[str, Any]:
    """Returns a message in the form that templates expect: text content as one string, tool arguments as objects.

    Args:
        message: a message in OpenAI's form.
        joint: text between the parts of the content.

    Raises:
        ChatTemplateError: the message has no role, or its calls are no list of objects.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        raise ChatTemplateError("every chat message needs a role")
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = joint.join(part_text(part) for part in content)
    elif content is None:
        plain["content"] = str(plain.get("refusal") or "")
    if plain.get("tool_calls"):
        if not isinstance(plain["tool_calls"], list | tuple):
            raise ChatTemplateError("a message's tool_calls must be a list")
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parses a call's arguments, which clients send as JSON. Text that is no object is an argument `arguments`."""
    if not isinstance(call, Mapping):
        raise ChatTemplateError("a tool call must be an object")
    function = call.get("function")
    if not isinstance(function, Mapping):
        if "function" not in call:
            return dict(call)
        function = {}
    arguments = function.get("arguments")
    for _ in range(2):  # some clients encode the text twice
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments) if arguments.strip() else {}
                json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair has no tokens
            except (ValueError, RecursionError):
                break
            arguments = parsed if isinstance(parsed, dict | str | None) else arguments
    if isinstance(arguments, str):
        arguments = arguments.encode(errors="replace").decode()
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"arguments": arguments}
    return {**call, "function": {**function, "name": function.get("name") or "", "arguments": arguments}}


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the base class fixes the name and form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, except that a forbidden attribute is an error at once, not an undefined value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        kind = type(obj).__name__
        raise SecurityError(f"access to attribute {attribute!r} of {kind!r} object is unsafe")


class _Turns:
    """Counts the turns of a rendering's loops."""

    def __init__(self) -> None:
        self._left, self._end = MOST_TURNS, time.monotonic() + MOST_SECONDS

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _OverLimit(f"the chat template took more than {MOST_TURNS:,} turns of its loops")
        if time.monotonic() > self._end:
            raise _OverLimit(f"the chat template took more than {MOST_SECONDS:g} seconds")


def _compiled(source: str) -> jinja2.Template:
    """Returns the template, with a call at the beginning of each loop's body."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        call = nodes.Call(nodes.Name(_TURN, "load"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
    return environment.template_class.from_code(environment, environment.compile(tree), environment.globals)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refused the conversation: {message}")
