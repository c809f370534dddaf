"""Splits one choice's text into reasoning, answer and tool calls, whole or as it arrives.

One reader for all formats of calls: `formats` declares what is between the marks. Models omit and repeat marks,
and write calls of another format between them, so the reader accepts all syntaxes there. Text that only resembles a
call remains text. A call's arguments are valid JSON whatever the model writes, unless the output limit cuts them off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from serving.api.http.json_values import well_formed
from serving.api.http.parsing.answer_pieces import AnswerPiece, TrimmedText
from serving.api.http.parsing.argument_values import TAG, markup_value, python_value, schema_types, whole_arguments
from serving.api.http.parsing.formats import (
    BARE,
    FORMATS,
    OF_LINES,
    SYNTAXES,
    WRAPPERS,
    CallFormat,
    CallSyntax,
    ReasoningMarks,
    offered_name,
    plain_name,
)  # fmt: skip
from serving.api.http.parsing.text_cursor import SPACE, TextCursor, TextEnds, Wait, cached_marks
from serving.api.http.parsing.written_json import WrittenObject, arguments_in, call_in, read_written
from serving.api.http.protocol.chat import CalledFunction, Tool, ToolCall
from serving.api.http.settings import ToolCallForm

_RETRIES = 4
"""Maximum number of objects that are read a second time, as text, because they are no call."""
_BETWEEN = SPACE + ",;[]}"
"""Characters that are ignored between calls."""
_LONGEST_WORD = 256
_WORD = re.compile(rf"[\w.\-:]{{1,{_LONGEST_WORD}}}|.", re.DOTALL)
"""A word between calls, after which the next one is looked for: with all letters of names, or each part of a word would
be searched to its end."""


class AnswerReader:
    """Reads one choice's text as it arrives.

    It returns a call's name as soon as it is known, and the arguments as they arrive. A call ends the reasoning.

    Args:
        form: format of calls; None to leave calls in the text.
        tools: the request's tools; their schemas determine which parameters are strings.
        most: maximum number of calls; further ones are dropped.
        forced: the answer consists of calls only, so the text of an incomplete call at its end is not shown.
        marks: the marks around reasoning; None if all of the text is the answer.
        begun: the text starts within reasoning. Otherwise it starts with the mark, or there is no reasoning.
    """

    def __init__(
        self, form: ToolCallForm | None = None, tools: Sequence[Tool] = (), *, most: int | None = None,
        forced: bool = False, marks: ReasoningMarks | None = None, begun: bool = False,
    ) -> None:  # fmt: skip
        self._style = None if form is None else FORMATS[form]
        self._schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._most, self._forced, self._marks = most, forced, marks
        self.inside = begun
        """Whether the next text is reasoning, as far as is known."""
        self._may_end = begun
        """The end mark of reasoning may follow."""
        self._ids = set[str]()
        """Ids of the calls so far."""
        self._piece = AnswerPiece()
        self._thoughts, self._answer = TrimmedText(strip=True), TrimmedText(strip=begun)
        self._cursor = TextCursor()
        self._retries = 0
        self._steps = self._all()

    @property
    def called(self) -> bool:
        """Whether the text contains a call so far."""
        return bool(self._ids)

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> AnswerPiece:
        """Reads new text. `last`: the text ends here; `cut`: because the output limit cut it off."""
        self._cursor.push(text, last=last, cut=cut)
        next(self._steps, None)
        piece, self._piece = self._piece, AnswerPiece()
        if last and not self.called and not self.inside:
            piece.add("text", self._answer.rest())
        if (most := self._most) is not None:
            piece.parts = [part for part in piece.parts if isinstance(part, tuple) or (part.index or 0) < most]
        return piece

    def _all(self) -> Wait[None]:
        try:
            if self._marks is not None and not self.inside:
                yield from self._opening(self._marks.begin)
            yield from self._line()
            while True:
                yield from self._prose()
        except TextEnds:
            pass

    def _opening(self, begin: str) -> Wait[None]:
        """Reads the begin mark of reasoning, if there is one."""
        found = yield from self._cursor.follows((begin,), 0)
        if found and found[0]:
            self._cursor.take(found[1])
            self.inside = self._may_end = True
            self._answer = TrimmedText(strip=True)

    def _show(self, text: str) -> None:
        if self.inside:
            self._piece.add("reasoning", self._thoughts.push(text))
        elif not self._forced:
            self._piece.add("text", self._answer.push(text))
            if self._style is None:
                self._piece.add("text", self._answer.rest())

    def _prose(self) -> Wait[None]:
        """Reads text up to a mark, and what the mark begins."""
        cursor, style = self._cursor, self._style
        ended = self._marks.end if self._marks is not None and self._may_end else ""
        marks = [ended]
        if style is not None:
            marks += [style.begin, style.end if self.called else "", *BARE, *WRAPPERS]
            marks.append("\n" if style.syntax in OF_LINES else "")
        try:
            mark = yield from cursor.until(cached_marks(*marks), self._show)
        except TextEnds:
            self._show(cursor.take(len(cursor.text) - cursor.at))
            raise
        if mark == ended:
            cursor.take(len(mark))
            self.inside = self._may_end = False
        elif style is None or mark == "\n":
            self._show(cursor.take(len(mark)))
            yield from self._line()
        elif mark == style.begin:
            yield from self._section(style)
        elif mark == style.end:  # models repeat marks
            cursor.take(len(mark))
        elif mark in WRAPPERS:
            yield from self._section(dataclasses.replace(style, begin=mark, end=WRAPPERS[mark]), offered=True)
        elif not (yield from self._bare(style)):
            self._show(cursor.take(len(mark)))

    def _line(self) -> Wait[None]:
        """Reads calls without a begin mark at the beginning of a line, if there are any."""
        style = self._style
        if style is not None and style.syntax in OF_LINES and self._schemas and not self.inside:
            yield from self._bare(style, "[" if style.around[0] == "[" else "")

    def _bare(self, style: CallFormat, before: str = "") -> Wait[bool]:
        """Reads calls without a begin mark, of tools that the request offers. Returns whether there are any."""
        cursor = self._cursor
        skipped = len((yield from cursor.mark(before))) if before else 0
        found = yield from self._head(style, offered=True, skipped=skipped)
        if found is None:
            return False
        syntax, matched = found
        size = skipped + len(matched[0])
        marks = (*syntax.parameter_begins, style.end)
        if syntax.parameters and not syntax.heads[0].before:  # a name alone says little
            mark, distance = yield from cursor.ahead(cached_marks(*marks), size)
            if not mark or (syntax.value_ends and distance != size):
                return False
        elif syntax.parameters and syntax.value_ends:  # prose may mention the mark
            mark, distance = yield from cursor.ahead(cached_marks(*marks, *syntax.ends), size)
            if not mark or cursor.text[cursor.at + size : cursor.at + distance].strip()[:1] not in ("", "{"):
                return False
        cursor.take(skipped)
        yield from self._read_call(style, syntax, matched)
        yield from self._more_calls(style, bare=True)
        return True

    def _section(self, style: CallFormat, *, offered: bool = False) -> Wait[None]:
        """Reads a begin mark and the calls after it, if `offered` only of tools that the request offers. Without a
        call, the mark is text."""
        cursor, before, raw = self._cursor, len(self._ids), list[str]()
        try:
            while mark := (yield from cursor.mark(style.begin, *WRAPPERS)):  # models repeat marks
                raw.append(cursor.take(len(mark)))
                yield from cursor.skip(SPACE + ",[]", raw.append)
            if (yield from cursor.skip_fence(raw.append)):
                yield from cursor.skip(SPACE + ",[]", raw.append)
            offered |= self.inside and not style.ends_reasoning
            called = yield from self._call(style, raw, offered=offered)
        except TextEnds:
            if len(self._ids) == before:
                self._show("".join(raw) + cursor.take(len(cursor.text) - cursor.at))
            raise
        if called:
            yield from self._more_calls(style)
        else:
            self._show("".join(raw))

    def _more_calls(self, style: CallFormat, *, bare: bool = False) -> Wait[None]:
        """Reads further calls, up to the end mark. Other text before it is dropped; without an end mark, it is shown.
        `bare`: there was no begin mark, so other text ends the calls."""
        cursor, raw, words = self._cursor, list[str](), False
        try:
            while True:
                yield from cursor.skip(_BETWEEN if bare else f"{_BETWEEN}`", raw.append)
                if mark := (yield from cursor.mark(style.end, style.begin)):
                    if mark == style.end:
                        cursor.take(len(mark))
                    return
                if (yield from self._call(style, raw, offered=bare, first=False)):
                    raw, words = [], False
                elif bare:
                    self._show("".join(raw).strip("[]},;"))
                    return
                else:
                    while other := _WORD.match(cursor.text, cursor.at):
                        if other.end() < len(cursor.text) or len(other[0]) == _LONGEST_WORD or cursor.last:
                            break
                        yield
                    raw.append(cursor.take(len(other[0]) if other else 1))
                    words = True
        except TextEnds:
            if words:
                self._show("".join(raw))
            raise

    def _head(
        self, style: CallFormat, *, offered: bool, skipped: int = 0, first: bool = True
    ) -> Wait[tuple[CallSyntax, re.Match[str]] | None]:
        """Returns the syntax and the head of the call that is next, after `skipped` characters; None if there is none.
        `offered`: only of tools that the request offers; `first`: also of another format that begins with the name."""
        for syntax in sorted(SYNTAXES, key=lambda syntax: syntax is not style.syntax):
            for head in syntax.heads:
                other = syntax is not style.syntax and not head.before
                if other and not first:
                    continue
                only = partial(_begins_one, self._schemas) if (offered or other) and not head.before else None
                matched = yield from self._cursor.head(head, skipped=skipped, only=only)
                if matched and (not (offered or other) or self._own(syntax.named(matched[1])[0]) in self._schemas):
                    return syntax, matched
        return None

    def _call(self, style: CallFormat, raw: list[str], *, offered: bool, first: bool = True) -> Wait[bool]:
        """Reads the call that is next. Returns whether there is one; `raw` gets text that was read but is no call."""
        found = yield from self._head(style, offered=offered, first=first)
        if found is not None:
            yield from self._read_call(style, *found)
        elif self._cursor.text.startswith("{", self._cursor.at):
            return (yield from self._unordered(style, raw, offered=offered))
        return found is not None

    def _unordered(self, style: CallFormat, raw: list[str], *, offered: bool) -> Wait[bool]:
        """Reads a call in JSON whose fields have an unusual order or form, when its text is complete."""
        cursor, written, valid, begin = self._cursor, WrittenObject(style.end), list[str](), len(raw)
        complete = False
        with contextlib.suppress(TextEnds):
            yield from read_written(cursor, written, valid.append, raw.append)
            complete = True
        call = call_in("".join(valid)) if complete and not written.broken else None
        if call is not None and (not offered or self._own(call[0]) in self._schemas):
            self._begin(call[0])
            self._emit(json.dumps(call[1], ensure_ascii=False))
            return True
        if self._retries < _RETRIES:
            self._retries += 1
            cursor.text, cursor.at = "".join(raw[begin:]) + cursor.text[cursor.at :], 0
            del raw[begin:]
        return False

    def _read_call(self, style: CallFormat, syntax: CallSyntax, matched: re.Match[str]) -> Wait[None]:
        self._cursor.take(len(matched[0]))
        name, call_id = syntax.named(matched[1])
        self._begin(name, call_id)
        schema = self._schemas.get(self._own(name), {})
        if syntax.parameters:
            with self._cursor.completing(lambda: self._emit("{}")):
                yield from self._cursor.skip(syntax.between)
                if not syntax.value_ends and (yield from self._cursor.mark("**")):
                    self._cursor.take(2)
                    yield from self._cursor.skip(SPACE)
        yield from self._cursor.skip_fence()
        if syntax.parameters:
            yield from self._parameters(style, syntax, schema)
        else:
            yield from self._object(style, syntax)

    def _own(self, name: str) -> str:
        return offered_name(name, self._schemas)

    def _begin(self, name: str, call_id: str | None = None) -> None:
        if self.inside:
            self.inside, self._answer = False, TrimmedText(strip=True)
        call_id = None if call_id is None else well_formed(call_id)
        if call_id is None or call_id in self._ids:
            call_id = f"call_{uuid.uuid4().hex}"
        self._ids.add(call_id)
        function = CalledFunction(name=well_formed(self._own(name)), arguments="")
        self._piece.parts.append(ToolCall(index=len(self._ids) - 1, id=call_id, type="function", function=function))

    def _emit(self, arguments: str) -> None:
        if arguments:
            function = CalledFunction(arguments=well_formed(arguments))
            self._piece.parts.append(ToolCall(index=len(self._ids) - 1, function=function))

    def _object(self, style: CallFormat, syntax: CallSyntax) -> Wait[None]:
        """Reads arguments that are a JSON object, and the end of their call."""
        cursor, closing = self._cursor, (*syntax.ends[:1], style.end)
        ends = cached_marks(*syntax.ends, style.end, style.begin, *syntax.begins)
        if cursor.text.startswith("{", cursor.at):
            yield from read_written(cursor, WrittenObject(*closing), self._emit)
        else:
            parts: list[str] = []
            with cursor.closing(lambda: self._emit(arguments_in("".join(parts)))):
                yield from cursor.until(ends, parts.append)
        if syntax.tagged:
            if (mark := (yield from cursor.until(ends))) in syntax.ends:
                cursor.take(len(mark))
            return
        yield from cursor.skip(SPACE + ",")
        if not cursor.text.startswith("{", cursor.at):  # other fields of the call
            rest = WrittenObject(*closing)
            rest.push("{")
            yield from read_written(cursor, rest, len)

    def _fields(self, written: WrittenObject) -> Wait[list[str]]:
        """Reads an object, and emits it without its last brace. Returns its keys."""
        parts = [""]

        def emit(text: str) -> None:
            text = parts.pop() + text
            parts.extend((text.removesuffix("}"), "}" if text.endswith("}") else ""))
            self._emit(parts[-2])

        yield from read_written(self._cursor, written, emit)
        return [*json.loads("".join(parts))]

    def _parameters(self, style: CallFormat, syntax: CallSyntax, schema: Mapping[str, Any]) -> Wait[None]:
        """Reads arguments that are named values, after an object with the first of them or all; and the end of their
        call."""
        cursor, keys, properties = self._cursor, list[str](), schema.get("properties") or {}
        ends, python = (*syntax.ends, style.end, style.begin, *syntax.begins), not syntax.value_ends
        whole = yield from whole_arguments(cursor, syntax, schema)
        self._emit("" if whole else "{")
        with cursor.closing(lambda: self._emit("}")):
            if whole:
                closing = style.end if python or not syntax.ends else syntax.ends[0]
                keys += yield from self._fields(WrittenObject(closing, python=python))
                yield from cursor.skip(SPACE)
                if python and not cursor.text.startswith(",", cursor.at):
                    yield from cursor.until(cached_marks(*ends))
            while True:
                yield from cursor.skip(syntax.between)
                if python and cursor.text[cursor.at] == "]":  # of all calls
                    break
                if mark := (yield from cursor.mark(*ends)):
                    if mark in syntax.ends:
                        cursor.take(len(mark))
                    break
                matched, tag = (yield from cursor.head(*syntax.parameters)), None
                if matched is None and syntax.value_ends:
                    unread = [name for name in properties if name not in keys]
                    tag = yield from cursor.head(TAG, only=partial(_begins_one, unread))
                    matched = tag = tag if tag and tag[1] in unread else None
                if matched is None and syntax.value_ends:  # text between parameters
                    cursor.take(1)
                    yield from cursor.until(cached_marks(*ends, *syntax.parameter_begins))
                    continue
                cursor.take(len(matched[0]) if matched else 0)
                unnamed = (name for name in properties if name not in keys)
                key = plain_name(matched[1]) if matched else next(unnamed, f"argument_{len(keys) + 1}")
                keys.append(key)
                self._emit(f"{', ' if len(keys) > 1 else ''}{json.dumps(key, ensure_ascii=False)}: ")
                types = schema_types(properties.get(key), schema)
                if syntax.value_ends:
                    own = dataclasses.replace(syntax, value_ends=(f"</{key}>",), padding="\n") if tag else syntax
                    further = {name for name in properties if name not in keys}
                    yield from markup_value(cursor, own, style, types, self._emit, further.__contains__)
                else:
                    yield from python_value(cursor, style.end, types, self._emit)


def _begins_one(names: Iterable[str], text: str) -> bool:
    return any(name.startswith(text) for name in names)
