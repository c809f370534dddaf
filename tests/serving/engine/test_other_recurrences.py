"""Models with other recurrences than Mamba2 through the whole engine: cached and with drafts, as Hugging Face says."""

import pytest

from serving import LLM, SamplingParams
from serving.engine.steps.batching import PrefillShape
from tests.support.engine_harness import SMALL
from tests.support.golden_case import CLEAR_GAP, Case
from tests.support.selection import slow

FLAGS = SMALL | {
    "max_model_len": 240, "max_num_seqs": 2, "max_num_batched_tokens": 96, "num_slots": 40, "num_pages": 80,
    "debug_state": True, "mamba_cache_mode": "all", "num_speculative_tokens": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "drafts", "interval"),
    [
        pytest.param("qwen3next", "mtp", 1, marks=pytest.mark.full),
        ("lfm2-moe", "ngram", 1),
        slow("qwen35", "ngram", 1),
        slow("qwen35-moe", "mtp", 1),
        slow("qwen3next-dense", "ngram", 1),
        slow("qwen3next", "mtp", 16),
        slow("lfm2", "ngram", 1),
        slow("kimi", "ngram", 1),
        slow("kimi", "ngram", 8),
        slow("ling3", "ngram", 8),
        pytest.param("ling3", "mtp", 1, marks=pytest.mark.full),
        pytest.param("minimax", "ngram", 1, marks=pytest.mark.full),
        slow("minimax", "ngram", 8),
        pytest.param("falcon-mamba", "ngram", 1, marks=pytest.mark.full),
        slow("mamba", "ngram", 1),
        pytest.param("jamba", "ngram", 1, marks=pytest.mark.full),
        pytest.param("lfm3", "ngram", 1, marks=pytest.mark.full),
        pytest.param("recurrent-gemma", "ngram", 1, marks=pytest.mark.full),
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
