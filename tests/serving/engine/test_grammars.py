"""Compiled grammars: trials, limits, and a choice's position in its grammar."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from checkpoints.tokenizer import load_tokenizer
from serving.core.errors import RequestError
from serving.engine.structured.grammars import Grammars, StructuredOutputs
from tests.support.models.letter_tokens import EOS, ID, TOO_BIG, WORDS, letters
from tests.support.waiting import comes_true, line_of

ROOT = Path(__file__).resolve().parents[3]
TOO_LARGE = StructuredOutputs(json={"type": "integer", "multipleOf": 123456789})
TOO_SLOW = StructuredOutputs(json={"type": "object", "patternProperties": {f"^x{i}_.*": {} for i in range(5000)}})


def of_demo(**options):
    tokenizer = load_tokenizer("demo")
    return Grammars(tokenizer, tokenizer.vocab_size, (0,), **options)


@pytest.fixture(scope="module")
def grammars():
    return of_demo(seconds=1.0)


@pytest.mark.smoke
@pytest.mark.parametrize("outputs", [TOO_SLOW, TOO_LARGE], ids=["time", "memory"])
def test_what_takes_too_much_is_refused_and_remembered(grammars, outputs):
    with pytest.raises(RequestError, match="the grammar takes more than"):
        grammars.start(outputs)
    begin = time.monotonic()
    with pytest.raises(RequestError, match="the grammar takes more than"):
        grammars.start(outputs)
    assert time.monotonic() - begin < 0.9, "tried again, for a second"
    assert not grammars.start(StructuredOutputs(regex="[0-9]+")).finished


@pytest.mark.smoke
@pytest.mark.parametrize(
    "grammar", ["start: s\ns: s s s | s s | /[a-z ]/ |", "start: s\ns: s s | /[a-z ]/ |"], ids=["three", "two"]
)
def test_a_grammar_that_becomes_slow_when_it_is_followed_is_refused(grammars, grammar):
    """It compiles in a millisecond; its masks take twenty at the fourth token and hundreds later."""
    with pytest.raises(RequestError, match="following the grammar becomes too complex"):
        grammars.start(StructuredOutputs(grammar=grammar))


def test_one_output_that_can_be_followed_is_enough(grammars):
    parts = '("a" | "b" | "ab")? ' * 300
    grammars.start(StructuredOutputs(grammar=f'start: "x" ("y" "!" | "z" {parts} "?")'))


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"grammar": "start: a\na: a"}, "no output is possible"), ({"json": {"$ref": "#"}}, "no output is possible"),
        ({"json": False}, "schema is false"), ({"json": "{"}, "not JSON"), ({"json": "[" * 100_000}, "not JSON"),
        ({"regex": "a" * (1 << 20)}, "longer than"), ({"grammar": 'root ::= "a'}, "structured outputs"),
    ],
)  # fmt: skip
def test_broken_grammars(grammars, form, says):
    with pytest.raises(RequestError, match=says) as caught:
        grammars.start(StructuredOutputs(**form))
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_others_compile_meanwhile():
    fresh = of_demo(seconds=3.0)
    fresh.start(StructuredOutputs(regex="warm"))
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(fresh.start, TOO_SLOW)
        for count in range(1, 6):
            fresh.start(StructuredOutputs(regex=f"[a-z]{{{count}}}"))
        assert not slow.done(), "the slow one has ended before the others were compiled"
        with pytest.raises(RequestError):
            slow.result(60)


def test_equal_grammars_are_compiled_once(grammars, monkeypatch):
    asked = []
    submit = grammars._trials.submit
    monkeypatch.setattr(grammars._trials, "submit", lambda *args: asked.append(args) or submit(*args))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(grammars.start, [StructuredOutputs(regex="once|and for all")] * 8, timeout=60))
    assert len(asked) == 1


def test_a_grammar_stays_for_as_long_as_it_is_held(grammars, monkeypatch):
    monkeypatch.setattr("serving.engine.structured.grammars._KEPT", 1)
    held = grammars.submit(StructuredOutputs(regex="held")).result()
    grammars.submit(StructuredOutputs(regex="another")).result()
    assert grammars.submit(StructuredOutputs(regex="held")).result() is held


@pytest.mark.full
def test_known_and_small_grammars_do_not_wait_behind_expensive_ones():
    """Two dozen grammars that take all the time that a trial may take, of a client with a key, and one without."""
    fresh = of_demo(seconds=20.0)
    known = fresh.submit(StructuredOutputs(regex="known")).result()
    bombs = [
        StructuredOutputs(json={"type": "object", "patternProperties": {f"^{i}x{j}_.*": {} for j in range(5000)}})
        for i in range(24)
    ]
    waiting, refused = [], 0
    for bomb in bombs:
        try:
            waiting.append(fresh.submit(bomb, "attacker"))
        except RequestError:
            refused += 1
    assert len(waiting) == 16
    assert refused == 8
    assert fresh.submit(StructuredOutputs(regex="known"), "victim").result(0) is known
    for i in range(3):
        fresh.submit(StructuredOutputs(regex=f"[a-z]{{{i + 1}}}"), "victim").result(60)
        done = sum(each.done() for each in waiting)
        assert done == 0, "an expensive grammar was compiled first"
    assert len(fresh._trials._lanes[-1].trying) <= 1
    fresh.close()
    for each in waiting:
        with pytest.raises(RequestError, match="too many grammars"):
            each.result(60)


def test_grammars_serve_the_other_engines_when_one_has_failed():
    shared = of_demo(users=2)
    shared.close()
    assert shared.submit(StructuredOutputs(regex="[0-9]{3}")).result()
    shared.close()
    with pytest.raises(RequestError, match="too many grammars"):
        shared.submit(StructuredOutputs(regex="[0-9]{4}")).result()


def test_the_queue_of_trials_is_bounded(grammars, monkeypatch):
    monkeypatch.setattr("serving.engine.structured.trials._WAITING", 0)
    with pytest.raises(RequestError, match="too many grammars") as caught:
        grammars.submit(StructuredOutputs(regex="one too many"))
    assert caught.value.retry
    monkeypatch.undo()
    assert grammars.submit(StructuredOutputs(regex="one too many")).result()  # it was not remembered as refused


def test_a_process_that_was_killed_is_replaced(grammars):
    grammars.start(StructuredOutputs(regex="before"))
    for trial in list(grammars._trials._processes):
        trial.process.kill()
        trial.process.wait()
    assert not grammars.start(StructuredOutputs(regex="after")).finished


@pytest.mark.full
def test_a_trial_does_not_outlive_its_parent():
    """Not even in the middle of a compilation, which keeps the interpreter."""
    program = (
        "from serving.engine.structured import trials\n"
        "from tests.serving.engine.test_grammars import TOO_SLOW, of_demo\n"
        "trials.QUICK_SECONDS = 600.0\n"
        "grammars = of_demo(seconds=600.0)\n"
        "exchange = trials._TrialProcess.exchange\n"
        "def tell(self, *args):\n"
        "    self.greeted and print(self.process.pid, flush=True)\n"
        "    return exchange(self, *args)\n"
        "trials._TrialProcess.exchange = tell\n"
        "grammars.start(TOO_SLOW)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        trial = int(line_of(parent))
        before = _processor_time(trial)
        while _processor_time(trial) < before + 0.3:  # it compiles
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    assert comes_true(lambda: _processor_time(trial) is None), "it still compiles"


def _processor_time(process: int) -> float | None:
    """Seconds that a process has computed for; None once it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return None if fields[0] in "ZX" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_tokenizer_that_cannot_be_used():
    with pytest.raises(RequestError, match="this model's tokenizer cannot be used"):
        Grammars(load_tokenizer("demo"), 5, (0,)).start(StructuredOutputs(regex="a"))


ONE_WAY_IS_TOO_BIG = f'start: "x" ("y" "x" "y" "!" | "z" {TOO_BIG} "?")'


@pytest.fixture(scope="module")
def letter_grammars():
    return Grammars(letters(), len(WORDS), (EOS,))


def allowed(mask: np.ndarray) -> set[str]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {word for i, word in enumerate(WORDS) if bits[i]}


def test_a_wrong_draft_leaves_no_trace(letter_grammars):
    constraint = letter_grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
    assert constraint.advance([ID["x"]]) == 1
    masks = constraint.masks([ID["z"], ID["ab"]], 3)
    assert allowed(masks[0]) == {"y", "z"}
    assert "a" in allowed(masks[1])
    assert constraint.error is None
    assert constraint.advance([ID["y"]]) == 1
    assert allowed(constraint.masks([], 3)[0]) == {"x"}
    assert constraint.advance([ID[c] for c in "xy!"]) == 3
    assert constraint.finished
    assert constraint.error is None


def test_a_right_draft_into_the_same_place_fails_as_without_drafts(letter_grammars):
    for drafts in ([], [ID["z"], ID["ab"]]):
        constraint = letter_grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
        constraint.advance([ID["x"]])
        constraint.masks(drafts, 3)
        assert constraint.advance([ID["z"], ID["ab"]]) == 1
        assert "items" in constraint.error


def test_an_end_where_the_grammar_wants_more_is_an_error(letter_grammars):
    """A head behind a failed draft allows everything, the end too."""
    constraint = letter_grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
    constraint.advance([ID["x"], EOS])
    assert "wants more" in constraint.error
    done = letter_grammars.start(StructuredOutputs(grammar='start: "a" "b"*'))
    assert done.advance([ID["a"], EOS]) == 2
    assert done.error is None
