"""Calls whose marks are missing, repeated, misspelled or those of another format."""

import json
from pathlib import Path

import pytest
import yaml

from serving.api.http.parsing.formats import WRAPPERS
from tests.support.servers.written_calls import cut, found, tool_with

F = tool_with({"a": {"type": "string"}, "b": {"type": "integer"}})
MALFORMED = yaml.safe_load(Path(__file__).with_name("malformed_calls.yaml").read_text()) + [
    ["nemotron", f"{begin}\n{call}\n{end} So.", [["f", {"a": "x"}]], " So."]
    for begin, end in WRAPPERS.items()
    for call in ("<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", '{"name": "f", "arguments": {"a": "x"}}')
]


@pytest.mark.parametrize(("form", "text", "calls", "rest"), MALFORMED)
def test_calls_with_wrong_marks(form, text, calls, rest):
    for size in (1, 3, 1000):
        shown, made = found(form, cut(text, size), [F])
        assert (shown, [[name, json.loads(arguments)] for name, arguments in made]) == (rest, calls)
