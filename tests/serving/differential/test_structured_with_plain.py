"""Rows under a grammar and plain rows in one batch, with drafts: each has the output that it has alone without drafts.

Structured rows skip the steps that would have to wait for them.
"""

import functools
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from mamba_jax.drafts import MTPDrafts, NGramDrafts
from mamba_jax.programs import StepPrograms
from serving import SamplingParams
from tests.serving.core.mutations.registry import Fault
from tests.serving.differential.faults import STRUCTURED
from tests.support.engines.engines import finish
from tests.support.engines.shared_engines import ROWS, SMALLEST, TILE, engines_of
from tests.support.engines.step_programs import shared_programs
from tests.support.models.letter_tokens import EOS
from tests.support.models.tiny_configs import ENGINE_VOCAB
from tests.support.selection import slow

FORMS = (
    {"regex": "(abcab){5}"},  # repeats itself: n-grams are right, and know nothing of where it ends
    {"regex": "[!-~]{3,20}"},  # allows nearly everything
    {"regex": "([a-c]{2}-[0-9])+"},
    {"choice": ["abababababab", "abababababx"]},
)


@dataclass(frozen=True)
class Drafts:
    """How all rows of a run draft, and are held; none: K = 0."""

    method: str = ""
    count: int = 0
    interval: int = 1

    def __str__(self) -> str:
        return f"{self.method} {self.count}" + (", replay" if self.interval > 1 else "")

    @property
    def flags(self) -> dict:
        """The engine's."""
        drafting = {"num_speculative_tokens": self.count, "speculative_method": self.method, "adaptive_drafts": False}
        slots = {"num_slots": 1 + ROWS * (2 * (1 + self.count) if self.interval == 1 else 3)}
        replay = {"replay_interval": self.interval}
        return {"enable_structured_outputs": True} | slots | replay | (drafting if self.count else {})


USUAL = [Drafts("ngram", 3), Drafts("mtp", 3)]
OTHERS = [Drafts("ngram", 1), Drafts("mtp", 1), Drafts("ngram", 3, TILE), Drafts("mtp", 3, TILE)]
"""These need programs of their own."""


@functools.cache
def programs_of(drafts: Drafts) -> StepPrograms:
    """Those that engines of one kind share, whatever their cache mode."""
    source = {"ngram": NGramDrafts(1, 3), "mtp": MTPDrafts()}.get(drafts.method)
    return shared_programs(engines_of(SMALLEST).model, tile_size=TILE, source=source, greedy=False)


def engine_of(drafts: Drafts, mode: str, **flags):
    """An engine whose rows draft so."""
    on = engines_of(SMALLEST)
    return on.engine(mode, programs=programs_of(drafts), eos_token_ids=(EOS,), **(drafts.flags | flags))


def vary(engine, drafts: Drafts) -> None:
    """Each request drafts as many as its number says, 0 to K; some another number each time."""
    rng = random.Random(0)

    def wanted(request) -> int:
        count = int(request.request_id) % (2 + drafts.count)
        return count if count <= drafts.count else rng.randrange(drafts.count + 1)

    engine.loop.scheduler.drafts.wanted = wanted


def ask(number: int) -> tuple[dict, SamplingParams]:
    """Every third request is structured, and the plain ones have more to say. Some prompts begin alike."""
    rng = random.Random(number)
    form = FORMS[number // 3 % len(FORMS)] if number % 3 == 0 else None
    shared = [7, 8, 9] * 6 if number % 2 else []
    prompt = shared + [rng.randrange(1, ENGINE_VOCAB) for _ in range(rng.randrange(1, 12))]
    temperature, length = (0.0, 0.7, 1.0)[number % 5 % 3], 25 if form else 48
    params = SamplingParams(
        temperature=temperature, seed=number, max_tokens=length, ignore_eos=form is None, structured_outputs=form
    )
    return {"prompt_token_ids": prompt}, params


def said(output) -> tuple:
    return output.outputs[0].finish_reason, *output.outputs[0].token_ids


@functools.cache
def alone(number: int) -> tuple:
    """What a request says by itself, without drafts and without a cache."""
    engine = engine_of(Drafts(), "none")
    output = engine.add_request("alone", *ask(number))
    finish(engine)
    return said(output)


def together(engine, numbers, *, aborted: int | None = None) -> dict[int, tuple]:
    """Their outputs in one batch, with a new request every other step; one request is aborted."""
    outputs, met = {}, Counter()
    for number in numbers:
        outputs[number] = engine.add_request(str(number), *ask(number))
        for _ in range(2):
            engine.step()
        if aborted is not None and number == aborted + 3:
            met["aborted"] += engine.abort(str(aborted)) is not None
    finish(engine)
    engine.loop.scheduler.check(idle=True)
    assert met["aborted"] == (aborted is not None)
    return {number: said(output) for number, output in outputs.items() if number != aborted}


def check(numbers, answers: dict[int, tuple]) -> None:
    wrong = [number for number in numbers if number in answers and answers[number] != alone(number)]
    assert not wrong, f"requests {wrong} say something else than alone"


@pytest.mark.full
@pytest.mark.parametrize("drafts", [USUAL[0], *map(slow, (USUAL[1], *OTHERS))], ids=str)
def test_each_says_what_it_says_alone(drafts: Drafts) -> None:
    """With room for all, and then with so little that rows are preempted, one request aborted, one step failing, and
    drafts of other numbers for each row."""
    accepted, preempted, compiled = 0, 0, None
    for mode in ("none", "align", "all"):
        engine = engine_of(drafts, mode)
        check(range(15), together(engine, range(15)))
        accepted += engine.loop.stats.drafts.accepted
        if compiled is not None:
            assert engine.loop.programs.compilations == compiled
        tight = engine_of(drafts, mode, num_pages=13)
        vary(tight, drafts)
        lost = RuntimeError("injected: the device is lost")
        tight.loop.fault = Mock(side_effect=itertools.chain([None] * 19, [lost], itertools.repeat(None)))
        check(range(15), together(tight, range(15), aborted=6))
        assert tight.loop.stats.failures == 1
        preempted += tight.loop.scheduler.stats()["preemptions"]
        compiled = engine.loop.programs.compilations
    assert accepted
    assert preempted


@pytest.mark.full
@pytest.mark.parametrize("drafts", USUAL, ids=str)
def test_neighbors_do_not_wait(drafts: Drafts) -> None:
    """Plain rows are part of every step, with all their drafts. The structured row takes part only when its mask is
    ready: at most in every second step, because a mask follows the tokens of the step before."""
    engine = engine_of(drafts, "all")
    plain = [engine.add_request(str(number), *ask(number)) for number in (1, 2, 4)]
    held = engine.add_request("0", *ask(0))
    steps: list[dict[str, int]] = []
    engine.loop.fault = lambda plan: steps.append({row.request.request_id: row.num_drafts for row in plan.rows})
    for _ in range(8):  # too few for any of them to end, whatever is accepted
        engine.step()
    assert engine.loop.stats.lockstep_steps == 0
    structured = [step.pop("0", None) for step in steps]
    assert structured[0] == 0
    assert all(None in pair for pair in itertools.pairwise(structured))
    assert {*structured} <= {None, 0, drafts.count}
    assert steps == [dict.fromkeys("124", 0)] + [dict.fromkeys("124", drafts.count)] * 7
    assert held.outputs[0].token_ids
    assert not any(output.finished for output in (held, *plain))
    engine.abort_all()
    finish(engine)


def test_where_most_are_structured_all_wait() -> None:
    engine = engine_of(Drafts("ngram", 3), "all")
    outputs = {number: engine.add_request(str(number), *ask(number)) for number in (0, 3, 6, 1)}
    finish(engine)
    check(outputs, {number: said(output) for number, output in outputs.items()})
    assert engine.loop.stats.lockstep_steps > 5
    assert engine.loop.stats.drafts.accepted


@pytest.mark.full
@pytest.mark.parametrize("fault", STRUCTURED.values(), ids=str)
def test_fault_shows(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(15):
        alone(number)
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(range(15), together(engine_of(Drafts("ngram", 3), "all"), range(15)))
