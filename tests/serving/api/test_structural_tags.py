"""Structural tags: what their grammars admit, and refusals of incomplete ones."""

import json

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.inputs import structured_outputs
from serving.api.http.parsing.grammars import structural_grammar
from serving.api.http.protocol.chat import ChatRequest
from serving.core.errors import RequestError
from serving.engine.structured.grammars import Grammars, StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OF_JSON = {"type": "json_schema", "json_schema": SCHEMA}
OLD = {"structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
                      {"begin": "<function=g>", "schema": {"type": "array"}, "end": "</function>"}],
       "triggers": ["<function="]}  # fmt: skip
NUMBER = {"begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+/?"}, "end": "</n>"}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
EITHER = {"type": "or", "elements": [OF_JSON, {"type": "const_string", "value": "none"}]}
NEW = {"type": "sequence", "elements": [THOUGHT, EITHER]}
LIST = {"type": "tags_with_separator", "separator": ", ", "tags": [NUMBER], "at_least_one": True}
ONE = {"type": "triggered_tags", "triggers": ["<"], "tags": [NUMBER], "at_least_one": True, "stop_after_first": True}


@pytest.fixture(scope="module")
def grammars():
    tokenizer = load_tokenizer("demo")
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 4))


@pytest.mark.parametrize(
    ("tag", "right", "wrong"),
    [
        (
            OLD,
            'so <function=f>{"a": 1}</function> and <function=g>[]</function>.',
            ["<function=h>", '<function=f>{"b"'],
        ),
        ({"format": NEW}, '<think>a < b</think>{"a": 3}', ["<think>a</think>{}", "none"]),
        ({"format": NEW}, "<think></think>none", ["<think></think>nil"]),
        ({"format": LIST}, "<n>1</n>, <n>2/</n>", ["<n>1</n> ", "<n>x"]),
        ({"format": ONE}, "first <n>1</n>", ["<n>x", "<n>1</n> more"]),
    ],
)
def test_what_a_tag_admits(grammars, tag, right, wrong):
    def admitted(text):
        constraint = grammars.start(StructuredOutputs(grammar=structural_grammar(tag)))
        ids = load_tokenizer("demo").encode(text, add_special_tokens=False)
        return constraint.advance(ids) == len(ids)

    assert admitted(right)
    assert not any(map(admitted, wrong))


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ({"format": {"type": "xml"}}, "not 'xml'"), ({"format": {"type": "sequence"}}, "elements must be a list"),
        ({"structures": OLD["structures"], "triggers": ["["]}, "no trigger begins the tag '<function=f>'"),
        ({"format": {"type": "tag", "begin": "<", "content": OF_JSON}}, "end of a tag"),
        ({}, "structures must be a list"), ({"format": {"type": ["x"]}}, r"not \['x'\]"),
        ({"structures": OLD["structures"], "triggers": 5}, "triggers must be a list"),
        ({"format": {"type": "json_schema", "json_schema": 5}}, "json_schema"),
        ({"format": {"type": "sequence", "elements": [OF_JSON] * 300}}, "more than 256 parts"),
    ],
)  # fmt: skip
def test_incomplete_tags_are_refused(tag, says):
    with pytest.raises(RequestError, match=says):
        structural_grammar(tag)


def test_both_fields_of_requests():
    own = {"structured_outputs": {"structural_tag": json.dumps(OLD)}}
    for fields in ({"response_format": {"type": "structural_tag", **OLD}}, own):
        request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
        assert structured_outputs(request) == StructuredOutputs(grammar=structural_grammar(OLD))
    deep = '{"format": ' + '{"type": "sequence", "elements": [' * 400 + "]}" * 400 + "}"
    for text in ("[", "[" * 5000, deep):
        bad = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"structural_tag": text}}
        with pytest.raises(RequestError, match="must be a JSON object"):
            structured_outputs(ChatRequest.model_validate(bad))
