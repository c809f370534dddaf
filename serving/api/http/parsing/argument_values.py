"""Reads a call's arguments that are written as text between marks, or as Python literals, and writes them as JSON."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable

from serving.api.http.parsing.call_formats import CallFormat, CallSyntax
from serving.api.http.parsing.text_cursor import SPACE, Marks, TextCursor, TextEnds, Wait, cached_marks
from serving.api.http.parsing.written_json import ESCAPE, ESCAPE_PART, WrittenObject, read_written, unescaped
from serving.api.http.parsing.written_values import WrittenText, read_literal

_PLAIN = re.compile(r"""[^\\"']+""")
_QUOTES = ('"""', "'''", '"', "'")
_BEGINNING = re.compile(r"""[rRbBfFuU]{0,2}(?:"{1,2}|'{1,2})?""")
_PREFIX = re.compile(r"""[rRbBfFuU]{1,2}(?=["'])""")
_AFTER = re.compile(r"\s{0,64}")


@functools.cache
def _value_marks(syntax: CallSyntax, style: CallFormat) -> tuple[Marks, Marks]:
    """Returns the marks that may end a value, and those that show whether a mark of a call is part of the value."""
    assert syntax.parameter is not None
    ends = [mark for mark in (syntax.value_end, syntax.end, style.end, syntax.parameter.before) if mark]
    padded = [syntax.padding + mark for mark in ends] if syntax.padding else []
    return Marks([*padded, *ends]), Marks([syntax.value_end, style.begin, syntax.heads[0].before])


def markup_value(
    text: TextCursor, syntax: CallSyntax, style: CallFormat, types: frozenset[str], emit: Callable[[str], None],
    is_key: Callable[[str], bool],
) -> Wait[None]:  # fmt: skip
    """Reads a value up to its end mark.

    Models omit end marks, and write the marks of calls in values. Another mark ends the value if the name of a further
    parameter follows (`is_key`), or if no end mark of a value follows before the next call.
    """
    assert syntax.parameter is not None
    value, (ends, later) = WrittenText(types, syntax.padding), _value_marks(syntax, style)

    def push(part: str) -> None:
        emit(value.push(part))

    try:
        while True:
            mark = yield from text.until(ends, push)
            if mark.endswith(syntax.value_end):
                text.take(len(mark))
                break
            size = len(mark)
            if mark.endswith(syntax.parameter.before):
                before = size - len(syntax.parameter.before)
                matched = yield from text.head(syntax.parameter, before, only=None)
                if matched is not None and is_key(matched[1].strip()):
                    break
            else:
                next_mark, distance = yield from text.ahead(later, size)
                if next_mark != syntax.value_end:
                    break
                size = max(size, distance - len(syntax.padding))
            push(text.take(size))
    except TextEnds:
        if not text.cut:
            emit(value.end())
        raise
    emit(value.end())


def python_value(text: TextCursor, closing: str, types: frozenset[str], emit: Callable[[str], None]) -> Wait[None]:
    """Reads a value up to the comma or the parenthesis after it. `closing`: the mark that ends all calls.

    A quote ends a string only where an argument or the call can end, because models forget to escape quotes.
    """
    try:
        yield from text.skip(SPACE)
    except TextEnds:
        emit("" if text.cut else "null")
        raise
    while not text.last and _BEGINNING.fullmatch(text.text, text.at):  # perhaps of a triple quote
        yield
    if prefix := _PREFIX.match(text.text, text.at):
        text.take(len(prefix[0]))
    quote = next((quote for quote in _QUOTES if text.text.startswith(quote, text.at)), "")
    if not quote:
        yield from _literal(text, closing, types, emit)
        return
    text.take(len(quote))
    emit('"')
    try:
        while not (yield from _string_part(text, quote, closing, emit)):
            pass
    except TextEnds:
        if not text.cut:
            emit('"')
        raise
    emit('"')


def _string_part(text: TextCursor, quote: str, closing: str, emit: Callable[[str], None]) -> Wait[bool]:
    """Reads a part of a string. Returns whether the string ends."""
    while text.at == len(text.text):
        yield from text.more()
    if plain := _PLAIN.match(text.text, text.at):
        part = text.take(len(plain[0]))
    elif text.text[text.at] == "\\":
        while ESCAPE_PART.fullmatch(text.text, text.at) and not text.last:
            yield
        escape = ESCAPE.match(text.text, text.at)
        if escape is None:
            raise TextEnds
        part = unescaped(escape)
        text.take(len(escape[0]))
    else:
        while quote.startswith(text.text[text.at :]) and len(text.text) - text.at < len(quote) and not text.last:
            yield
        if text.text.startswith(quote, text.at) and (yield from _ends_string(text, quote, closing)):
            text.take(len(quote))
            return True
        part = text.take(1)
    emit(json.dumps(part, ensure_ascii=False)[1:-1])
    return False


def _ends_string(text: TextCursor, quote: str, closing: str) -> Wait[bool]:
    while True:
        space = _AFTER.match(text.text, text.at + len(quote))
        after = space.end() if space else 0
        rest = text.text[after : after + len(closing)]
        if rest.startswith((",", ")")) or rest == closing:
            return True
        if not closing.startswith(rest):
            return False
        if text.last:
            return True
        yield


def _literal(text: TextCursor, closing: str, types: frozenset[str], emit: Callable[[str], None]) -> Wait[None]:
    """Reads a value that is not a string, and what follows it up to a comma or parenthesis."""
    ends = cached_marks("(", ")", ",", closing)
    if text.text[text.at] == "{":
        yield from _table(text, closing, types, emit)
        return
    if text.text[text.at] in "[(":
        yield from read_written(text, WrittenObject(closing, python=True), emit)
        yield from text.until(ends)
        return
    parts, depth = list[str](), 0
    try:
        while True:
            mark = yield from text.until(ends, parts.append)
            if mark == closing or (depth == 0 and mark != "("):
                break
            depth += {"(": 1, ")": -1}.get(mark, 0)
            parts.append(text.take(1))
    except TextEnds:
        if not text.cut:
            emit(json.dumps(read_literal("".join(parts), types), ensure_ascii=False))
        raise
    emit(json.dumps(read_literal("".join(parts), types), ensure_ascii=False))


def _table(text: TextCursor, closing: str, types: frozenset[str], emit: Callable[[str], None]) -> Wait[None]:
    """Reads a value in braces: an object if its first key has a colon and the schema admits one, else a text."""
    written, raw, held = WrittenObject(closing, python=True), list[str](), list[str]()
    admitted = not types or bool(types & {"object", "array"})

    def push(valid: str) -> None:
        held.append(valid)
        if admitted and written.first_keyed:
            emit("".join(held))
            held.clear()

    def end() -> None:
        if not admitted or written.first_keyed is False:
            emit(json.dumps("".join(raw).rstrip(), ensure_ascii=False))
        elif not written.first_keyed:
            emit("".join(held))

    try:
        yield from read_written(text, written, push, raw.append)
        yield from text.until(cached_marks("(", ")", ",", closing), raw.append)
    except TextEnds:
        if not text.cut:
            end()
        raise
    end()
