"""Reasoning before an answer: where it ends, what it may cost, and that the answer's form begins right there."""

import random

import numpy as np
import pytest

from checkpoints.tokenizer import load_tokenizer
from serving import SamplingParams
from serving.core.errors import RequestError
from serving.engine.structured.grammars import Grammars, StructuredOutputs
from serving.engine.structured.reasoning import Reasoning, ReasoningConstraint
from tests.serving.differential.test_structured_with_plain import USUAL, Drafts, engine_of
from tests.support.engines.engines import finish
from tests.support.models.letter_tokens import ID, WORDS
from tests.support.servers.written_calls import tokenizer_with

TOKENIZERS = {"tokens": tokenizer_with("<think>", "</think>"), "texts": load_tokenizer("demo")}
"""Marks that are tokens of their own, and marks that are spelled."""
KINDS = tuple(TOKENIZERS)
TOKENIZERS["joined"] = tokenizer_with("</think>\n4", special=False)
GRAMMARS = {name: Grammars(each, each.vocab_size, (2,)) for name, each in TOKENIZERS.items()}
EOS_OF_DEMO = 2


def constraint(kind, reasoning, **form):
    answer = GRAMMARS[kind].start(StructuredOutputs(**form)) if form else None
    return ReasoningConstraint(reasoning, answer, GRAMMARS[kind])


def allowed(mask, size):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist())


def ids_of(kind, text):
    return TOKENIZERS[kind].encode(text, add_special_tokens=False)


# A mark of several tokens cannot begin an output that has a form: its first token may be the answer's.
@pytest.mark.parametrize(("kind", "begun"), [("tokens", True), ("tokens", False), ("texts", True)])
def test_the_form_begins_after_the_mark(kind, begun):
    follow, size = constraint(kind, Reasoning(begun=begun), regex="[0-9]+x"), TOKENIZERS[kind].vocab_size
    text = ("" if begun else "<think>") + "\nSo <b>7</b>? No.\n</think>"
    for token in ids_of(kind, text):
        assert token in allowed(follow.masks((), 1)[0], size)
        assert not follow.finished
        assert follow.advance([token]) == 1
    (digit,) = ids_of(kind, "4")
    now = allowed(follow.masks((), 1)[0], size)
    assert digit in now
    assert not now & {*ids_of(kind, "So"), EOS_OF_DEMO}
    assert follow.advance([*ids_of(kind, "42x"), digit]) == 3
    assert follow.finished
    assert follow.error is None


def test_reasoning_cannot_end_an_output_that_must_have_an_answer():
    size = TOKENIZERS["tokens"].vocab_size
    assert EOS_OF_DEMO not in allowed(constraint("tokens", Reasoning(begun=True), regex="a").masks((), 1)[0], size)
    assert EOS_OF_DEMO in allowed(constraint("tokens", Reasoning(begun=True, budget=9)).masks((), 1)[0], size)


def test_an_answer_may_begin_at_once():
    follow, size = constraint("tokens", Reasoning(), regex="[0-9]x"), TOKENIZERS["tokens"].vocab_size
    (mark,), (digit,) = ids_of("tokens", "<think>"), ids_of("tokens", "5")
    assert {mark, digit} <= allowed(follow.masks((), 1)[0], size)
    assert follow.advance([digit]) == 1
    assert allowed(follow.masks((), 1)[0], size) == set(ids_of("tokens", "x"))
    # A mark of several tokens is not offered: its first token may be the answer's, too.
    spelled = constraint("texts", Reasoning(), regex="[0-9]x")
    assert allowed(spelled.masks((), 1)[0], TOKENIZERS["texts"].vocab_size) <= set(ids_of("texts", "0123456789"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("form", [{}, {"regex": "ab"}])
def test_a_budget_ends_it(kind, budget, form):
    follow, size = constraint(kind, Reasoning(begun=True, budget=budget), **form), TOKENIZERS[kind].vocab_size
    (word,) = ids_of(kind, "a")
    for _ in range(budget):
        assert word in allowed(follow.masks((), 1)[0], size)
        follow.advance([word])
    for token in ids_of(kind, "</think>"):
        assert allowed(follow.masks((), 1)[0], size) == {token}
        follow.advance([token])
    after = allowed(follow.masks((), 1)[0], size)
    assert after == (set(ids_of(kind, "ab")) if form else set(range(size)))


def test_a_budget_of_reasoning_that_may_not_come():
    free = constraint("texts", Reasoning(budget=2))
    for token in ids_of("texts", "The answer is long and has no reasoning"):
        assert allowed(free.masks((), 1)[0], 8) == set(range(8))
        assert free.advance([token]) == 1
    bound = constraint("texts", Reasoning(budget=2))
    for token in ids_of("texts", "\n<think> a b"):
        bound.advance([token])
    assert allowed(bound.masks((), 1)[0], TOKENIZERS["texts"].vocab_size) == set(ids_of("texts", "</think>")[:1])


def test_an_answer_that_begins_within_a_token():
    follow, last = constraint("joined", Reasoning(begun=True), regex="[0-9]x"), TOKENIZERS["joined"].vocab_size - 1
    assert allowed(follow.masks([last], 2)[1], last) == {*ids_of("joined", "x")}
    follow.advance([last])
    assert allowed(follow.masks((), 1)[0], last) == {*ids_of("joined", "x")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [{}, {"regex": "[0-9]{2}[a-c]"}])
@pytest.mark.parametrize("begun", [True, False])
def test_masks_along_drafts_are_those_without(kind, form, begun):
    """Whatever is drafted: each head allows what a constraint allows that has followed the drafts before it."""
    rng = random.Random(f"{kind}{form}{begun}")
    size = TOKENIZERS[kind].vocab_size
    texts = ["<think>a</think>12a", "<think>abc</think>", "</think>7", "12c", "x</think>33b", "<think>", "9"]
    for _ in range(40):
        reasoning = Reasoning(begun=begun, budget=rng.choice([None, 0, 2, 4]))
        one, other = constraint(kind, reasoning, **form), constraint(kind, reasoning, **form)
        before = ids_of(kind, rng.choice(texts))[: rng.randrange(4)]
        for follow in (one, other):
            for token in before:
                if token in allowed(follow.masks((), 1)[0], size):
                    follow.advance([token])
        drafts = ids_of(kind, rng.choice(texts))[:3]
        for head, mask in enumerate(one.masks(drafts, 1 + len(drafts))):
            assert (mask == other.masks((), 1)[0]).all()
            if head == len(drafts) or drafts[head] not in allowed(mask, size) or other.finished:
                break
            other.advance([drafts[head]])


@pytest.mark.smoke
@pytest.mark.parametrize("drafts", [Drafts(), USUAL[0]], ids=str)
def test_an_engine(drafts):
    """Marks of letters: the reasoning is at most so long, and the answer has its form; with drafts the same."""
    said = {}
    for mode in ("none", "all"):
        engine = engine_of(drafts, mode)
        for budget in (0, 3, 9):
            reasoning = {"begin": "(", "end": ")", "begun": True, "budget": budget}
            forms = {"reasoning": reasoning, "structured_outputs": {"regex": "[xyz]{2}"}}
            params = SamplingParams(temperature=1.0, seed=budget, max_tokens=30, **forms)
            output = engine.add_request(f"{budget}", {"prompt_token_ids": [5, 6, 7]}, params)
            finish(engine)
            said[mode, budget] = [WORDS[token] for token in output.outputs[0].token_ids]
            end = said[mode, budget].index(")")
            assert end <= budget
            assert "".join(said[mode, budget][end + 1 :]) in {a + b for a in "xyz" for b in "xyz"}
            assert output.outputs[0].finish_reason == "stop"
            assert ID[")"] == output.outputs[0].token_ids[end]
    assert all(said["none", budget] == said["all", budget] for budget in (0, 3, 9))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"budget": -1}, "budget: must be"), ({"budget": 1.5}, "budget: must be"), ({"budget": True}, "must be"),
        ({"begin": ""}, "begin: must have"), ({"begun": 1}, "begun: must be"), ({"start": "x"}, "some of begin"),
        (3, "some of"),
    ],
)  # fmt: skip
def test_values_that_are_wrong(value, says):
    with pytest.raises(RequestError, match=says):
        SamplingParams(reasoning=value)
