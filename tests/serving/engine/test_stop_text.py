"""Stop texts are found by an automaton: the same as by looking at all of them, in time proportional to the text."""

import dataclasses
import random

import pytest

from serving.engine.request_error import RequestError
from serving.engine.requests.output import Choice
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
        hold = max(
            size for stop in self.texts for size in range(len(stop)) if text.endswith(stop[:size]) and size <= len(text)
        )
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


class CountedEdges(dict):
    """Counts how often an edge is looked for."""

    count = 0

    def get(self, *args):
        type(self).count += 1
        return super().get(*args)


def test_the_work_per_character_does_not_depend_on_the_stop_texts():
    # Each text is as bad as can be: the stream is always in the middle of all of them.
    texts = ["a" * size + "b" for size in range(1, 64)] + ["a" * 1900 + "c"]
    automaton = StopAutomaton(texts)
    automaton.next = CountedEdges(automaton.next)
    stop = StopText(automaton)
    stream = ("a" * 1900 + "d") * 5
    CountedEdges.count = 0
    shown = "".join(stop.push(character) for character in stream) + stop.flush()
    assert shown == stream
    assert CountedEdges.count <= 2 * len(stream) + 5  # a step falls back at most as often as steps went on before


def test_a_piece_that_shows_nothing_copies_nothing():
    stop = StopText(StopAutomaton(["a" * 4000]))
    assert all(stop.push("a") == "" for _ in range(3999))
    assert stop.push("b") == "a" * 3999 + "b"


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
    for index in range(3):
        Choice(index, params, None)
    assert len(built) == 1
    assert dataclasses.replace(params, n=2) == dataclasses.replace(params, n=2)
