"""Members of a schedule-invariant engine: what they divide, and how a step is cut, changes no bit."""

import functools

import jax
import numpy as np
import pytest

from checkpoints.load import load_config
from kernels_pallas.native import WHY_MISSING
from serving import SamplingParams
from tests.support.engines.divided_engines import answers, divided_llm
from tests.support.engines.engines import OPTIMIZED
from tests.support.engines.step_programs import few_programs, own_programs
from tests.support.hlo_traffic import sums_of_devices
from tests.support.models.divisible_checkpoints import EIGHT, FAMILIES, GOLDEN, MORE, write_checkpoint
from tests.support.models.golden_case import assert_greedy
from tests.support.selection import slow

pytestmark = pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")
CASES = FAMILIES | MORE | {"eight": EIGHT}


def is_supported(case):
    """Whether no recurrence of the model has bits that depend on the schedule."""
    return not any(one.varying_bits for one in load_config(GOLDEN / case.golden).recurrences)


SUPPORTED = [name for name, case in sorted((FAMILIES | MORE).items()) if is_supported(case)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype", "members", "shards"),
    [
        ("eight", "float32", 2, 4),
        ("kimi", "bfloat16", 4, 2),
        slow("qwen3next", "bfloat16", 8, 1),
        slow("mamba2", "float32", 1, 2),
        *(slow(name, "float32", 4, 2) for name in SUPPORTED),
    ],
)
def test_divided_steps_have_the_bits_of_undivided_ones(name, dtype, members, shards, tmp_path, monkeypatch):
    """Slots and pages of both engines, answers, and the answer's log-probabilities as those of a prompt."""
    case, flags = CASES[name], {"schedule_invariant": True, "dtype": dtype, "compilation_cache": False}
    directory, engines, exchanges = write_checkpoint(tmp_path, case), [], []
    for least in (4, 1 << 20):
        monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", least)
        with few_programs(functools.partial(own_programs, compiler_options=OPTIMIZED)):
            llm = divided_llm(directory, case, shards, context_parallel_size=members, **flags)
        outputs = answers(llm)
        (prefill,) = (program for name, program in llm.engine.loop.programs.cache if name == "PrefillBatch")
        assert not sums_of_devices(prefill.as_text())
        exchanges.append(prefill.as_text().count(" all-to-all("))
        engines.append((llm, outputs))
    (one, divided), (other, whole) = engines
    assert exchanges[0] > exchanges[1]
    if dtype == "float32":
        assert_greedy(divided, directory)
    for mine, right in zip(divided, whole, strict=True):
        assert mine.outputs[0].token_ids == right.outputs[0].token_ids
        assert mine.outputs[0].logprobs == right.outputs[0].logprobs
    stores = [llm.engine.loop.store for llm in (one, other)]
    for mine, right in zip(*map(jax.tree.leaves, stores), strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[1:], np.asarray(right)[1:])
    (choice,) = divided[0].outputs
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = divided[0].prompt_token_ids + choice.token_ids
    for llm, _ in engines:
        tables = llm.generate([prompt], scoring, use_tqdm=False, cache_salt="scored")[0].prompt_logprobs
        scored = [table[token].logprob for token, table in zip(choice.token_ids, tables[-10:], strict=True)]
        assert scored == [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
