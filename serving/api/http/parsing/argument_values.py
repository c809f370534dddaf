"""Reads a call's arguments that are written as text between marks, or as Python literals, and writes them as JSON."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from serving.api.http.json_values import parse_written
from serving.api.http.parsing.formats import FUNCTION, KEYS, CallFormat, CallSyntax, plain_name
from serving.api.http.parsing.text_cursor import SPACE, Head, Marks, TextCursor, Wait, cached_marks
from serving.api.http.parsing.written_json import WrittenObject, read_written

_STRING = re.compile(r"""[rRbBfFuU]{0,2}(\"{3}|'{3}|["'])""")
_STRING_BEGINS = re.compile(r"""[rRbBfFuU]{0,2}(?:"{1,2}|'{1,2})?""")
TAG = Head("<", ">", name=r"[\w.\-]{1,64}")
"""The beginning of a value in a tag with the name of its parameter, as models write instead of the format's marks."""


@functools.lru_cache(1024)
def _value_marks(syntax: CallSyntax, style: CallFormat) -> tuple[Marks, Marks]:
    """Returns the marks that may end a value, and those that show whether a mark of a call is part of the value."""
    ends = [*syntax.value_ends, *syntax.ends, style.end, *syntax.parameter_begins]
    padded = [syntax.padding + mark for mark in ends] if syntax.padding else []
    return Marks([*padded, *ends]), Marks([syntax.value_ends[0], style.begin, *syntax.begins])


def markup_value(
    text: TextCursor, syntax: CallSyntax, style: CallFormat, types: frozenset[str], emit: Callable[[str], None],
    is_key: Callable[[str], bool],
) -> Wait[None]:  # fmt: skip
    """Reads a value up to its end mark.

    Models omit end marks, and write the marks of calls in values. Another mark ends the value if the name of a further
    parameter follows (`is_key`), or if no end mark of a value follows before the next call.
    """
    (push, end), (ends, later) = _text_writer(types, syntax.padding, emit), _value_marks(syntax, style)
    with text.closing(end):
        while True:
            mark = yield from text.until(ends, push)
            size = len(mark)
            if mark.endswith(syntax.value_ends):
                if (yield from _ends_here(text, mark, syntax, style, is_key)):
                    text.take(size)
                    break
            elif mark.endswith(syntax.parameter_begins):
                before = len(syntax.padding) if mark.startswith(syntax.padding) else 0
                matched = yield from text.head(*syntax.parameters, skipped=before)
                if matched is not None and is_key(plain_name(matched[1])):
                    break
            else:
                next_mark, distance = yield from text.ahead(later, size)
                if next_mark != syntax.value_ends[0]:
                    break
                size = max(size, distance - len(syntax.padding))
            push(text.take(size))


def _ends_value(text: TextCursor, size: int, syntax: CallSyntax, style: CallFormat) -> Wait[bool]:
    """Returns whether an end mark, `size` letters long, ends its value: another one follows neither before any other
    mark nor right after the end of the call."""
    closing, ends = syntax.value_ends[0], (*syntax.ends, style.end)
    marks = (*ends, *syntax.parameter_begins, *syntax.begins, closing)
    if (following := (yield from text.follows(marks, size))) is None:
        return (yield from text.ahead(cached_marks(*marks), size))[0] != closing
    while following and following[0] in ends:
        following = yield from text.follows((*ends, closing), following[1])
        if following and following[0] == closing:
            return False
    return True


def _ends_here(
    text: TextCursor, written: str, syntax: CallSyntax, style: CallFormat, is_key: Callable[[str], bool]
) -> Wait[bool]:
    """Returns whether an end mark of values ends this one. After another spelling than the usual one, the end of the
    call or a further parameter must follow, and not the rest of the value before its own end."""
    size = len(written)
    if written.endswith(syntax.value_ends[0]):
        return (yield from _ends_value(text, size, syntax, style))
    marks = (*syntax.parameter_begins, *FUNCTION.ends, *syntax.ends, style.end, *syntax.begins)
    if (yield from text.follows(marks, size)) is None:
        return False
    mark, distance = yield from text.ahead(
        cached_marks(syntax.value_ends[0], style.begin, *syntax.begins, *syntax.parameter_begins), size
    )
    if mark not in syntax.parameter_begins:
        return mark != syntax.value_ends[0]
    matched = yield from text.head(*syntax.parameters, skipped=distance)
    return matched is not None and is_key(plain_name(matched[1]))


def whole_arguments(text: TextCursor, syntax: CallSyntax, schema: Mapping[str, Any]) -> Wait[bool]:
    """Returns whether an object is next that has all arguments. A Python call may have it as its first argument, which
    the tool's `schema` and the object's first key tell."""
    if not text.text.startswith("{", text.at) or syntax.value_ends:
        return text.text.startswith("{", text.at)
    matched, properties = (yield from text.head(*KEYS)), schema.get("properties") or {}
    if matched is None or not properties:
        return matched is not None
    first, types = next(iter(properties)), schema_types(next(iter(properties.values())), schema)
    if matched[1] in properties:
        return matched[1] == first or "object" not in types
    return bool(types) and "object" not in types


def python_value(text: TextCursor, closing: str, types: frozenset[str], emit: Callable[[str], None]) -> Wait[None]:
    """Reads a value up to the comma or the parenthesis after it. `closing`: the mark that ends all calls."""
    with text.completing(lambda: emit("null")):
        yield from text.skip(SPACE)
    while not text.last and _STRING_BEGINS.fullmatch(text.text, text.at):
        yield
    ends = cached_marks("(", ")", ",", closing)
    if string := _STRING.match(text.text, text.at):
        text.take(len(string[0]))
        emit('"')
        yield from read_written(text, WrittenObject(closing, python=True, quote=string[1]), emit)
    elif text.text[text.at] == "{":
        yield from _table(text, closing, types, emit)
    elif text.text[text.at] in "[(":
        yield from read_written(text, WrittenObject(closing, python=True), emit)
        yield from text.until(ends)
    else:
        parts, depth = list[str](), 0

        def end() -> None:
            emit(json.dumps(read_value("".join(parts).strip(), types, python=True), ensure_ascii=False))

        with text.closing(end):
            while (mark := (yield from text.until(ends, parts.append))) != closing and (depth or mark == "("):
                depth += {"(": 1, ")": -1}.get(mark, 0)
                parts.append(text.take(1))


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

    with text.closing(end):
        yield from read_written(text, written, push, raw.append)
        yield from text.until(cached_marks("(", ")", ",", closing), raw.append)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None), "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict,
    "string": str,
}  # fmt: skip


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """Returns the types of the values that a JSON schema admits, as far as it and the first 1000 of its alternatives
    and references name them; empty if they name none. `root`: the schema that references refer to."""
    found, waiting, seen = set[str](), [schema], set[int]()
    while waiting and len(seen) < 1000:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        names = part.get("type")
        names = [names] if isinstance(names, str) else names
        values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
        if isinstance(names, list):
            found.update(name for name in names if isinstance(name, str))
        elif values:
            found.update(name for name in _TYPES for value in values if _is(value, name))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                alternatives = part.get(word)
                waiting += alternatives if isinstance(alternatives, list) else ()
            reference = part.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/"):
                target = root
                for key in reference[2:].split("/"):
                    target = target.get(key) if isinstance(target, Mapping) else None
                waiting.append(target)
    return frozenset(found)


def _text_writer(
    types: frozenset[str], padding: str, emit: Callable[[str], None]
) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns two functions that emit the JSON of a value written as text without quotes: one to call with each part of
    the text, and one to call at its end. Strings are emitted as they arrive, values of other `types` at their end.
    `padding`: text before the value."""
    parts, begun, plain = list[str](), False, types in ({"string"}, {"string", "null"})

    def push(text: str) -> None:
        nonlocal begun
        if begun:
            emit(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        parts.append(text)
        if not plain:  # joining the parts each time takes quadratic time
            return
        value = "".join(parts).removeprefix(padding)
        begun = bool(value) and not ("null" in types and "null".startswith(value))
        if begun:
            emit(json.dumps(value, ensure_ascii=False)[:-1])

    def end() -> None:
        value = "".join(parts).removeprefix(padding)
        emit('"' if begun else json.dumps(read_value(value, types), ensure_ascii=False))

    return push, end


def read_value(text: str, types: frozenset[str], *, python: bool = False) -> Any:
    """Returns the value of `text`. Text that cannot be parsed is a string.

    Args:
        text: a string without quotes, or JSON. If the schema admits other types but no strings, the text may also have
            Python's spelling (`True`, `None`).
        types: the types that the schema admits. If it admits strings, a value that it does not admit is a string.
        python: `text` is a Python literal other than a string in quotes. Then only a number that the schema does not
            admit is a string.
    """
    if types == {"string"} and not python:
        return text
    try:
        value = parse_literal(text) if python or (types and "string" not in types) else parse_written(text)
    except ValueError:
        return text
    may_be_text = "string" in types and (not python or isinstance(value, (int, float)))
    return text if may_be_text and not any(_is(value, name) for name in types) else value


def parse_literal(text: str) -> Any:
    """Returns the value of a Python or JSON literal: `None` and `null`, `True` and `true`, lists, tuples, dictionaries.

    Raises:
        ValueError: the text is not one literal, or a key has no colon.
    """
    written = WrittenObject(python=True)
    read, valid, complete = written.push(f"[{text}]")
    values = json.loads(valid) if complete and written.keyed and read == len(text) + 2 else []
    if len(values) != 1:
        raise ValueError("not a literal")
    return values[0]


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES.get(name, ())) and not (isinstance(value, bool) and name in ("integer", "number"))
