"""Text that grows: stop texts across pieces, hold-back, tokens that are not shown, log-probabilities cut alike."""

import numpy as np
import pytest

from serving.engine.requests.output import Choice, token_logprobs
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.requests.stop_text import StopAutomaton, StopText


class Letters:
    """A tokenizer whose tokens are letters."""

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


def stop_text(texts, **options):
    return StopText(StopAutomaton(texts), **options)


def feed(choice: Choice, text: str, step: int = 1):
    for at in range(0, len(text), step):
        if choice.append([ord(letter) for letter in text[at : at + step]]):
            return


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_stop_text_is_found_wherever_the_pieces_end(cut):
    stop = stop_text(["</s>", "STOP"])
    text = "some <text STO</s>hidden"
    shown = ""
    for at in range(0, len(text), cut):
        shown += stop.push(text[at : at + cut])
        assert "some <text STO".startswith(shown)
    assert (shown, stop.found, stop.flush()) == ("some <text STO", "</s>", "")


def test_what_could_begin_a_stop_text_is_held_back_and_comes_out_in_the_end():
    stop = stop_text(["abab"])
    assert stop.push("xab") == "x"
    assert stop.push("ac") == "abac"
    assert stop.push("aba") == ""
    assert stop.flush() == "aba"


def test_the_stop_text_that_begins_first_wins():
    stop = stop_text(["lo w", "hello"])
    assert stop.push("say hello world") == "say "
    assert stop.found == "hello"


def test_including_the_stop_text():
    stop = stop_text(["."], include=True)
    assert stop.push("end. more") == "end."


@pytest.mark.parametrize("step", [1, 2, 5])
def test_tokens_after_a_stop_text_are_cut(step):
    choice = Choice(0, SamplingParams(stop=["END"], max_tokens=99), Letters())
    feed(choice, "theENDmore", step)
    assert choice.output.text == "the"
    assert len(choice.output.token_ids) == len("theEND")
    assert (choice.output.finish_reason, choice.output.stop_reason) == ("stop", "END")


def test_min_tokens_holds_stop_texts_off():
    choice = Choice(0, SamplingParams(stop=["a"], min_tokens=3, max_tokens=99), Letters())
    feed(choice, "aaab")
    assert choice.output.text == "aaab"
    feed(choice, "a")
    assert (choice.output.text, choice.output.stop_reason) == ("aaab", "a")


def test_a_stop_token_is_a_token_of_the_output_but_not_text():
    for stop in (None, ["zz"]):
        choice = Choice(0, SamplingParams(stop=stop), Letters())
        choice.append([ord("a"), ord("b")], ended=True)
        choice.finish("stop", ord("b"))
        assert (choice.output.text, choice.output.token_ids) == ("a", [97, 98])
    choice = Choice(0, SamplingParams(include_stop_str_in_output=True), Letters())
    choice.append([97, 98], ended=True)
    choice.finish("stop", 98)
    assert choice.output.text == "ab"


def test_text_is_made_late_but_completely():
    choice = Choice(0, SamplingParams(), Letters())
    feed(choice, "x" * 300)
    assert choice.output.text == ""
    choice.finish("length")
    assert choice.output.text == "x" * 300
    assert choice.output.finished


def test_logprobs_are_cut_with_the_tokens():
    choice = Choice(0, SamplingParams(stop=["b"], logprobs=1), Letters())
    tables = [token_logprobs(t, -1.0, np.array([t]), np.array([-1.0])) for t in (97, 98, 99)]
    assert choice.append([97, 98, 99], tables)
    assert len(choice.output.logprobs) == len(choice.output.token_ids) == 2
    assert choice.output.cumulative_logprob == -2.0


def test_the_chosen_token_comes_first_whatever_its_rank():
    table = token_logprobs(5, -3.0, np.array([7, 9]), np.array([-0.5, -1.0]))
    assert list(table) == [5, 7, 9]
    assert [entry.rank for entry in table.values()] == [None, 1, 2]
