"""Text of outputs: stop texts are found as by looking at all of them, in time proportional to the text."""

import dataclasses
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from serving.core.errors import RequestError
from serving.engine.requests.output import token_logprobs
from serving.engine.requests.request import Choice, EngineRequest, UserRequest
from serving.engine.requests.sampling_params import MAX_STOP_CHARACTERS, SamplingParams
from serving.engine.requests.stop_text import StopAutomaton, StopText


class PlainStopText:
    """The definition: after each piece, all of the text that is held back is compared with every stop text."""

    def __init__(self, texts, include):
        self.texts, self.include, self.held, self.found = texts, include, "", None

    def push(self, piece):
        if self.found is not None:
            return ""
        text = self.held + piece
        hits = [(text.find(stop), -len(stop), stop) for stop in self.texts if stop in text]
        if hits:
            at, _, self.found = min(hits)
            self.held = ""
            return text[: at + len(self.found)] if self.include else text[:at]
        hold = max(n for stop in self.texts for n in range(len(stop)) if text.endswith(stop[:n]) and n <= len(text))
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self):
        held, self.held = self.held, ""
        return held


@pytest.mark.parametrize("letters", ["a", "ab", "abc", "aé☃"])
def test_the_same_as_by_definition(letters):
    random_ = random.Random(f"stop texts {letters}")

    def word(longest):
        return "".join(random_.choices(letters, k=random_.randint(1, longest)))

    found = 0
    for _ in range(3000):
        texts = [word(7) for _ in range(random_.randint(1, 5))]
        include = random_.random() < 0.3
        ours, plain = StopText(StopAutomaton(texts), include=include), PlainStopText(texts, include)
        for _ in range(random_.randint(1, 12)):
            piece = word(5) if random_.random() < 0.9 else ""
            assert (ours.push(piece), ours.found) == (plain.push(piece), plain.found), (texts, piece)
        assert ours.flush() == plain.flush()
        found += ours.found is not None
    assert found > 100


def test_the_work_per_character_does_not_depend_on_the_stop_texts():
    # Each text is as bad as can be: the stream is always in the middle of all of them.
    texts = ["a" * size + "b" for size in range(1, 64)] + ["a" * 1900 + "c"]
    automaton = StopAutomaton(texts)
    automaton.next = edges = Mock(wraps=automaton.next)
    stop = StopText(automaton)
    stream = ("a" * 1900 + "d") * 5
    shown = "".join(stop.push(character) for character in stream) + stop.flush()
    assert shown == stream
    assert 0 < edges.get.call_count <= 2 * len(stream) + 5  # a step falls back at most as often as steps went on before


def test_the_total_length_of_stop_texts_is_bounded():
    SamplingParams(stop=["a" * 64] * 64)
    with pytest.raises(RequestError, match=r"^stop has 4,097 characters in total"):
        SamplingParams(stop=["a" * MAX_STOP_CHARACTERS, "b"])
    with pytest.raises(RequestError, match=r"^stop has"):
        SamplingParams(stop="a" * 5000)


def test_all_choices_of_a_request_share_one_automaton(monkeypatch):
    built = []
    monkeypatch.setattr(StopAutomaton, "_link", lambda self: built.append(self))
    params = SamplingParams(stop=["abc"], n=3)
    for _ in range(3):
        choice_of(params)
    assert len(built) == 1
    assert dataclasses.replace(params, n=2) == dataclasses.replace(params, n=2)


def choice_of(params, text=None):
    return Choice(UserRequest(EngineRequest("r", "", params), None), 0, text)


LETTERS = SimpleNamespace(push=lambda ids: "".join(map(chr, ids)), flush=lambda: "")
"""A tokenizer whose tokens are letters."""


def feed(choice: Choice, text: str, step: int = 1):
    for at in range(0, len(text), step):
        if choice.append([ord(letter) for letter in text[at : at + step]]):
            return


@pytest.mark.parametrize("step", [1, 2, 5])
def test_tokens_after_a_stop_text_are_cut(step):
    choice = choice_of(SamplingParams(stop=["END"], max_tokens=99), LETTERS)
    feed(choice, "theENDmore", step)
    assert choice.output.text == "the"
    assert len(choice.output.token_ids) == len("theEND")
    assert (choice.output.finish_reason, choice.output.stop_reason) == ("stop", "END")


def test_min_tokens_holds_stop_texts_off():
    choice = choice_of(SamplingParams(stop=["a"], min_tokens=3, max_tokens=99), LETTERS)
    feed(choice, "aaab")
    assert choice.output.text == "aaab"
    feed(choice, "a")
    assert (choice.output.text, choice.output.stop_reason) == ("aaab", "a")


def test_a_stop_token_is_a_token_of_the_output_but_not_text():
    for stop in (None, ["zz"]):
        choice = choice_of(SamplingParams(stop=stop), LETTERS)
        choice.append([ord("a"), ord("b")], ended=True)
        choice.finish("stop", ord("b"))
        assert (choice.output.text, choice.output.token_ids) == ("a", [97, 98])
    choice = choice_of(SamplingParams(include_stop_str_in_output=True), LETTERS)
    choice.append([97, 98], ended=True)
    choice.finish("stop", 98)
    assert choice.output.text == "ab"


def test_text_is_made_late_but_completely():
    choice = choice_of(SamplingParams(), LETTERS)
    feed(choice, "x" * 300)
    assert choice.output.text == ""
    choice.finish("length")
    assert choice.output.text == "x" * 300
    assert choice.output.finished


def test_logprobs_are_cut_with_the_tokens():
    choice = choice_of(SamplingParams(stop=["b"], logprobs=1), LETTERS)
    tables = [token_logprobs(t, -1.0, np.array([t]), np.array([-1.0])) for t in (97, 98, 99)]
    assert choice.append([97, 98, 99], tables)
    assert len(choice.output.logprobs) == len(choice.output.token_ids) == 2
    assert choice.output.cumulative_logprob == -2.0


def test_the_chosen_token_comes_first_whatever_its_rank():
    table = token_logprobs(5, -3.0, np.array([7, 9]), np.array([-0.5, -1.0]))
    assert list(table) == [5, 7, 9]
    assert [entry.rank for entry in table.values()] == [None, 1, 2]
