"""Structured outputs have their form, with and without drafts, next to unconstrained requests; structural tags."""

import json
import re

import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.api.http.apis.inputs import structured_outputs
from serving.api.http.parsing.grammars import structural_grammar
from serving.api.http.protocol.chat import ChatRequest
from serving.core.errors import RequestError
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammars import StructuredOutputs
from tests.support.models.letter_tokens import TOO_BIG
from tests.support.servers.live_server import last_error


def test_all_choices_have_the_form_and_neighbors_are_free(server):
    before, compiled = (server.metric(f"mamba_jax_{name}_total") for name in ("lockstep_steps", "compilations"))
    free = server.complete("A neighbor", max_tokens=20).json()["choices"][0]["text"]
    prompts = ["A neighbor", "Another"]
    answer = server.complete(prompts, n=3, temperature=1.0, seed=2, structured_outputs={"regex": "[a-c]{1,4}"}).json()
    assert all(re.fullmatch("[a-c]{1,4}", choice["text"]) for choice in answer["choices"])
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    assert server.complete("A neighbor", max_tokens=20).json()["choices"][0]["text"] == free
    assert server.metric("mamba_jax_lockstep_steps_total") > before
    assert server.metric("mamba_jax_compilations_total") == compiled


def test_logprobs_and_stops_work_too(server):
    form = {"regex": "[0-9]{6}"}
    answer = server.complete(structured_outputs=form, logprobs=2, max_tokens=20).json()["choices"][0]
    assert "".join(answer["logprobs"]["tokens"]).startswith(answer["text"])
    assert len(answer["logprobs"]["tokens"]) == len(answer["logprobs"]["token_logprobs"])
    stopped = server.complete(structured_outputs=form, stop=answer["text"][3], max_tokens=20).json()["choices"][0]
    assert stopped["text"] == answer["text"][: answer["text"].index(answer["text"][3])]
    kept = server.complete(structured_outputs=form, ignore_eos=True, max_tokens=20).json()["choices"][0]
    assert kept["text"] == answer["text"]


@pytest.mark.smoke
@pytest.mark.parametrize("n", [2, 1])
def test_a_grammar_that_becomes_too_complex(server, n):
    """It is the request's own fault: 400 before anything was sent, and an event of the same type afterwards."""
    late = {"grammar": f'start: "{"abc " * 40}" {TOO_BIG}'}  # after more tokens than its trial follows
    fields = {"structured_outputs": late, "max_tokens": 200, "n": n}
    answer = server.complete(**fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    stream = server.complete(**fields, stream=True)
    assert stream.status_code == 200
    error = last_error(stream.text)
    assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
    server.assert_idle()


def test_offline_parameters():
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputs(regex="a")
    one = "exactly one"
    for wrong, says in (({}, one), ({"json_object": False}, one), ({"xml": 1}, "a table with some of")):
        with pytest.raises(RequestError, match=says):
            SamplingParams(structured_outputs=wrong)
    assert StructuredOutputs(json=False).key == '["json", false]'


OF_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OF_JSON = {"type": "json_schema", "json_schema": OF_A}
OLD = {"structures": [{"begin": "<function=f>", "schema": OF_A, "end": "</function>"},
                      {"begin": "<function=g>", "schema": {"type": "array"}, "end": "</function>"}],
       "triggers": ["<function="]}  # fmt: skip
NUMBER = {"begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+/?"}, "end": "</n>"}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
EITHER = {"type": "or", "elements": [OF_JSON, {"type": "const_string", "value": "none"}]}
NEW = {"type": "sequence", "elements": [THOUGHT, EITHER]}
LIST = {"type": "tags_with_separator", "separator": ", ", "tags": [NUMBER], "at_least_one": True}
ONE = {"type": "triggered_tags", "triggers": ["<"], "tags": [NUMBER], "at_least_one": True, "stop_after_first": True}


def tag(given):
    """The form of a structural tag."""
    return {"grammar": structural_grammar(given)}


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, ["012-af"], ["01-", "012-ag"]),
        ({"choice": ["yes", 'the "other"', "né"]}, ["yes", 'the "other"', "né"], ["no", "the o"]),
        ({"grammar": 'start: "a" "b"+ "c"\n'}, ["abc", "abbc"], ["ac", "abcc"]),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, ["xy", "xz"], ["xx"]),
        ({"json": {"type": "boolean"}}, ["true", "false"], ["null"]),
        ({"json": '{"const": 5}'}, ["5"], ["6"]),
        ({"json_object": True}, ['{"a": [1]}'], ["[", "5"]),
        (tag(OLD), ['so <function=f>{"a": 1}</function> and <function=g>[]</function>.'],
         ["<function=h>", '<function=f>{"b"']),
        (tag({"format": NEW}), ['<think>a < b</think>{"a": 3}'], ["<think>a</think>{}", "none"]),
        (tag({"format": NEW}), ["<think></think>none"], ["<think></think>nil"]),
        (tag({"format": LIST}), ["<n>1</n>, <n>2/</n>"], ["<n>1</n> ", "<n>x"]),
        (tag({"format": ONE}), ["first <n>1</n>"], ["<n>x", "<n>1</n> more"]),
    ],
)  # fmt: skip
def test_what_a_form_admits(grammars, form, right, wrong):
    """What is right is admitted as a whole; of what is wrong, some token is not."""
    tokenizer = load_tokenizer("demo")
    for text in (*right, *wrong):
        constraint = grammars.start(StructuredOutputs(**form))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (constraint.advance(ids) == len(ids)) == (text in right), text
        if text in right:
            constraint.advance([tokenizer.eos_token_id])
            assert constraint.error is None, text


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
    def read(**fields):
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        return structured_outputs(ChatRequest.model_validate(body))

    assert read(response_format={"type": "structural_tag", **OLD}) == StructuredOutputs(**tag(OLD))
    assert read(structured_outputs={"structural_tag": json.dumps(OLD)}) == StructuredOutputs(**tag(OLD))
    assert read(response_format={"type": "json_object"}) == StructuredOutputs(json_object=True)
    assert read(response_format={"type": "text"}) is None
    deep = '{"format": ' + '{"type": "sequence", "elements": [' * 400 + "]}" * 400 + "}"
    for text in ("[", "[" * 5000, deep):
        with pytest.raises(RequestError, match="must be a JSON object"):
            read(structured_outputs={"structural_tag": text})
