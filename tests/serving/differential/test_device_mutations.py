"""Every planted fault of the device's side shows in one short piece of traffic. The table is docs/mutations.md."""

import re
from pathlib import Path

import numpy as np
import pytest

from serving.engine.requests.sampling_params import SamplingParams
from tests.serving.differential import adapter_faults, draft_faults, faults, replay_faults, structured_faults  # noqa: F401
from tests.serving.differential.faults import DEVICE, Fault
from tests.serving.differential.judging import TOLERANCE, Divergence
from tests.support.engines.engines import finish
from tests.support.engines.patched_programs import PatchedPrograms
from tests.support.engines.shared_engines import SMALLEST, TILE, engines_of
from tests.support.models.tiny_configs import ENGINE_VOCAB

_RNG = np.random.default_rng(11)
FIRST, OTHER, TAIL = (_RNG.integers(0, ENGINE_VOCAB, count).tolist() for count in (41, 12, 30))
# Waves of prompts: each is asked while the answers to the one before are still coming.
WAVES = (
    [FIRST[:21], OTHER, [5]],
    [FIRST[:21], FIRST[:18], FIRST[:17], OTHER],
    [FIRST[:16] + TAIL[:2], FIRST[:21] + TAIL[:12], FIRST, TAIL[:25]],
    [FIRST, FIRST[:32] + TAIL[:3], FIRST[:40], OTHER + TAIL[:9]],
    [FIRST[:24] + TAIL[:1], TAIL[:25], TAIL[:24] + OTHER, FIRST[:21]],
    [FIRST[:21] + TAIL[:12], FIRST[:40] + OTHER[:2], TAIL[:16], [7, 8]],
)


def run(compiles: str | None = None) -> None:
    """All waves; every output must be what the model says of the whole sequence at once."""
    on = engines_of(SMALLEST)
    programs = PatchedPrograms(on.programs, on.compile_anew() if compiles else None, compiles)
    engine = on.engine("all", programs=programs, state_block_size=TILE, max_num_batched_tokens=28)
    params = SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True, logprobs=0)
    outputs = []
    for wave, prompts in enumerate(WAVES):
        outputs += [
            engine.add_request(f"{wave}.{i}", {"prompt_token_ids": prompt}, params) for i, prompt in enumerate(prompts)
        ]
        for _ in range(9):
            engine.step()
        if wave % 2:
            finish(engine)
            while outputs:
                _judge(outputs.pop())
    assert engine.loop.scheduler.stats()["full_hits"] > 3


def _judge(output) -> None:
    (choice,) = output.outputs
    if choice.finish_reason != "length":
        raise Divergence(f"{output.request_id}: ended with {choice.finish_reason}")
    prompt = output.prompt_token_ids
    said = engines_of(SMALLEST).whole([*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
    for at, (token, row) in enumerate(zip(choice.token_ids, said, strict=True)):
        if not abs(choice.logprobs[at][token].logprob - row[token]) <= TOLERANCE or row.max() - row[token] > TOLERANCE:
            raise Divergence(f"{output.request_id}: token {at} of {len(prompt)} + {len(said)} is wrong")


def test_sound_programs_pass() -> None:
    run()


@pytest.mark.full
@pytest.mark.parametrize("fault", DEVICE.values(), ids=lambda fault: f"D{fault.number}-{fault.plant.__name__}")
def test_fault_shows(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    engines_of(SMALLEST).alone((1, 2, 3))  # the sound programs are compiled before anything is planted
    engines_of(SMALLEST).whole([1])
    fault.plant(monkeypatch)
    with pytest.raises(Divergence):
        run(fault.compiles)


def test_table_is_complete() -> None:
    table = (Path(__file__).parents[3] / "docs" / "mutations.md").read_text()
    for number, fault in faults.planted().items():
        assert re.search(rf"^\| D{number} \| {re.escape(fault.fault)} \| {fault.cases} \|", table, re.MULTILINE), (
            f"D{number} is not listed"
        )
