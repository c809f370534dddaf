"""Models with other recurrences than Mamba2 through the whole engine: cached and with drafts, as Hugging Face says."""

import pytest

from serving import LLM, SamplingParams
from serving.engine.steps.batching import PrefillShape
from tests.golden.recipes import RECIPES
from tests.support.engines.engine_harness import SMALL
from tests.support.models.golden_case import CLEAR_GAP, OTHER_RECURRENCES, Case
from tests.support.selection import slow

FLAGS = SMALL | {
    "max_model_len": 240, "max_num_seqs": 2, "max_num_batched_tokens": 96, "num_slots": 40, "num_pages": 80,
    "debug_state": True, "mamba_cache_mode": "all", "num_speculative_tokens": 3,
}  # fmt: skip


def marks(name):
    """One by default, one of each family in the full tier."""
    if name == "lfm2-moe":
        return ()
    return pytest.mark.slow if RECIPES[name].steps == "slow" else pytest.mark.full


@pytest.mark.parametrize(
    ("name", "drafts", "interval"),
    [
        *(
            pytest.param(name, "mtp" if RECIPES[name].mtp else "ngram", 1, marks=marks(name))
            for name in OTHER_RECURRENCES
        ),
        slow("qwen3next", "mtp", 16),
        slow("kimi", "ngram", 8),
        slow("ling3", "ngram", 8),
        slow("minimax", "ngram", 8),
    ],
)
def test_answers_are_those_of_hugging_face(name, drafts, interval, quick_compilation):
    case = Case(name)
    llm = LLM(case.directory, dtype="float32", speculative_method=drafts, replay_interval=interval, **FLAGS)
    # One shape for each kind of step: compiling is what takes time.
    llm.engine.loop.batches.decode_shapes = [2]
    llm.engine.loop.batches.prefill_shapes = [PrefillShape(tokens=96, rows=2, tiles=8)]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in case.prompts]
    for again in (False, True):
        for row, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
            expected, gaps = case.greedy(row)
            clear = next((i for i, gap in enumerate(gaps) if gap < CLEAR_GAP), len(gaps))
            assert list(output.outputs[0].token_ids)[:clear] == expected[:clear], (name, row, again)
            assert output.num_cached_tokens == len(case.prompts[row]) or not again
    llm.engine.loop.scheduler.check(idle=True)
