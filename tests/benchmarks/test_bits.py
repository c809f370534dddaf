"""The table of `benchmarks.bits`: it counts bits that differ, and its schedules do what their names say."""

import json
from functools import partial

import numpy as np
import pytest

from benchmarks import bits
from benchmarks.bits import Schedule, Workload, compare_schedules
from checkpoints.random import write_random
from kernels_pallas import native
from mamba_jax.programs import StepPrograms
from serving.engine.llm import LLM
from serving.engine.requests.output import CompletionOutput, Logprob, RequestOutput
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import OPTIMIZED
from tests.support.engines.step_programs import few_programs, own_programs
from tests.support.models.divisible_checkpoints import GOLDEN
from tests.support.models.tiny_configs import TRAINABLE

SMALL = Workload(prompt=90, answer=40, neighbors=(2,), chunks=(16,))
FLAGS = {"tile_size": 16, "state_block_size": 32, "num_slots": 40, "dtype": "float32"}
LOGPROBS = [float(np.float32(value)) for value in (-0.1, -0.7, -1.3, -2.9)]


def answer(tokens=(5, 6, 7, 8), logprobs=LOGPROBS):
    tables = [{token: Logprob(value, None)} for token, value in zip(tokens, logprobs, strict=True)]
    choice = CompletionOutput(0, token_ids=list(tokens), logprobs=tables, finish_reason="length")
    return RequestOutput("r", None, [1, 2, 3], [choice], True)


def scored(logprobs=LOGPROBS):
    tables = [None, *({token: Logprob(-3.0, None)} for token in (2, 3))]
    tables += [{token: Logprob(value, None)} for token, value in zip((5, 6, 7, 8), logprobs, strict=True)]
    return RequestOutput("s", None, [1, 2, 3, 5, 6, 7, 8], [], True, prompt_logprobs=tables)


def compared(run):
    return bits._Runs([1, 2, 3], [], Workload(answer=4)).compared("s", run, answer())


@pytest.mark.parametrize("make", [answer, scored])
def test_equal_bits_are_counted_and_one_changed_bit_is_a_difference(make):
    assert compared(make()) == Schedule("s", 4, 4, 0.0)
    changed = list(LOGPROBS)
    changed[2] = float(np.nextafter(np.float32(changed[2]), np.float32(0)))
    line = compared(make(logprobs=changed))
    assert (line.equal, line.total) == (3, 4)
    assert 0 < line.largest < 1e-6


def test_nothing_after_another_token_counts_as_equal():
    assert compared(answer((5, 9, 7, 8))) == Schedule("s", 1, 4, 0.0, "another token at 1")


def test_the_command_prints_a_table_or_json_lines(monkeypatch, capsys):
    lines = [Schedule("alone", 4, 4, 0.0), Schedule("7 neighbors", 1, 4, 2e-6, "another token at 1")]
    asked = []
    monkeypatch.setattr(bits, "compare_schedules", lambda model, *, flags: asked.append((model, flags)) or lines)
    bits.main(["--model", "some/model", "--dtype", "bfloat16", "--schedule-invariant"])
    table = capsys.readouterr().out
    assert "some/model, bfloat16" in table
    assert "1 of 4" in table
    bits.main(["--json"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Schedule(**one) for one in printed] == lines
    assert asked == [
        ("some/model", {"dtype": "bfloat16", "schedule_invariant": True}),
        ("demo", {"dtype": "auto", "schedule_invariant": False}),
    ]


@pytest.fixture
def model(tmp_path):
    return str(write_random(tmp_path, TRAINABLE))


@pytest.fixture
def quick_compilation():
    with few_programs(own_programs):
        yield


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_each_schedule_is_what_its_name_says(model):
    lines = list(compare_schedules(model, SMALL, flags=FLAGS))
    notes = {line.name: line.note for line in lines}
    assert list(notes) == [
        "alone", "alone, again cold", "half the prompt cached", "whole prompt cached", "2 neighbors",
        "scored as a prompt", "chunks of 16", "3 n-gram drafts", "3 MTP drafts", "preempted",
        "split, full", "split, recompute-last", "restored from host memory", "restored from disk",
    ]  # fmt: skip
    assert all(line.total == 40 for line in lines)
    assert all(line.equal == 40 for line in lines[:2])
    assert all(line.largest < 1e-4 for line in lines)
    assert notes["half the prompt cached"] == "45 tokens cached"
    assert notes["whole prompt cached"] == "90 tokens cached"
    assert int(notes["preempted"].split()[0]) >= 1
    assert int(notes["3 n-gram drafts"].split()[2]) > 0
    for handoff in ("full", "recompute-last"):
        assert "bytes of 1 states transferred" in notes[f"split, {handoff}"]
    for place in ("host memory", "disk"):
        assert notes[f"restored from {place}"] == "90 tokens cached, 1 states fetched"


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_one_request_at_a_time_without_reuse_keeps_bits(model):
    flags = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_model_len": 96, "num_slots": 8, "num_pages": 8}
    llm = LLM(model, **flags, max_num_batched_tokens=32, tile_size=16, state_block_size=32, dtype="float32")
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 40, size).tolist() for size in (7, 70, 33, 50)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    expected = [output.outputs[0].logprobs for output in llm.generate(prompts, params, use_tqdm=False)]
    for _ in range(10):
        order = random.permutation(len(prompts))
        outputs = llm.generate([prompts[n] for n in order], params, use_tqdm=False)
        assert [output.outputs[0].logprobs for output in outputs] == [expected[n] for n in order]


INVARIANT = FLAGS | {"schedule_invariant": True}
needs_native = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")


@needs_native
@pytest.mark.slow  # the full tier has traces of invariant engines, which are asked for the same bits
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("trainable", "bfloat16"),
        *((name, "float32") for name in ("trainable", "lfm2", "ling3", "jamba")),
        *((name, "bfloat16") for name in ("falconh1", "qwen3next", "kimi", "zamba2", "nemotronh-latent")),
        ("falcon-mamba", "bfloat16"),
    ],
)
def test_schedule_invariant_bits(tmp_path, monkeypatch, name, dtype):
    model = str(write_random(tmp_path, TRAINABLE) if name == "trainable" else GOLDEN / name)
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", partial(StepPrograms, compiler_options=OPTIMIZED))
    lines = list(compare_schedules(model, SMALL, flags=INVARIANT | {"dtype": dtype}))
    assert {line.name: line.equal for line in lines} == {line.name: 40 for line in lines}
    notes = {line.name: line.note for line in lines}
    assert int(notes.get("preempted", "1").split()[0]) >= 1


@needs_native
@pytest.mark.parametrize("kernels", ["auto", pytest.param("invariant_interpreted", marks=pytest.mark.full)])
def test_bits_of_an_answer_next_to_another_in_chunks_and_scored(model, monkeypatch, kernels):
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", own_programs)  # of all shapes
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 8}
    llm = LLM(model, **INVARIANT, **sizes, kernels=kernels, warmup=kernels == "auto")
    prompt, other = np.random.default_rng(0).integers(4, 40, (2, 40)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    alone = llm.generate([prompt], params, use_tqdm=False, cache_salt="a")[0].outputs[0]
    among = llm.generate([other, prompt], params, use_tqdm=False, cache_salt="b")[1].outputs[0]
    assert among.logprobs == alone.logprobs
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = llm.generate([prompt + alone.token_ids], scoring, use_tqdm=False, cache_salt="c")[0]
    values = [table[token].logprob for token, table in zip(alone.token_ids, scored.prompt_logprobs[-4:], strict=True)]
    assert values == [table[token].logprob for token, table in zip(alone.token_ids, alone.logprobs, strict=True)]
