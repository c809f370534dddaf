"""A recurrence from outside: one operation folder, one mixer, one family, and everything knows it.

No other file is there for it. What docs/extending.md says about these three is tried here.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints import load_model
from mamba_jax import families
from mamba_jax.drafts import NGramDrafts
from mamba_jax.layout import SequenceLayout
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.cli.main import app
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.requests.sampling_params import SamplingParams
from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import ONCE, PrefillSide, fed_tokens
from serving.split.worker import Worker
from tests.extending.average import reference
from tests.extending.family import FAMILY
from tests.extending.mixer import AVERAGE
from tests.support.engines.engines import finish
from tests.support.engines.step_programs import shared_programs
from tests.support.fleets.split_pair import DirectTransport
from tests.support.models.golden_case import chosen_logprobs, log_probs

families.register(FAMILY)

TILE, BLOCK = 8, 16
PROMPT = [3, 14, 15, 92, 65, 35] * 7
FLAGS = {
    "tile_size": TILE, "state_block_size": BLOCK, "page_size": 8, "max_model_len": 96, "max_num_seqs": 3,
    "max_num_batched_tokens": 48, "num_slots": 40, "num_pages": 40, "debug_state": True, "warmup": False,
    "prompt_lookup_min": 1,
}  # fmt: skip
DRAFTS = {"none": {}, "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 2}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = tmp_path_factory.mktemp("toy")
    (found / "config.json").write_text(json.dumps({"model_type": "moving_average"}))
    return str(found)


@functools.cache
def model(directory):
    return load_model(directory, load_format="dummy", dtype="float32", progress=False)


@functools.cache
def programs(directory, drafts):
    source = NGramDrafts(1, 4) if drafts == "ngram" else None
    made = shared_programs(model(directory), tile_size=TILE, source=source)
    if made.kept is not None:  # what the files of this folder say is not in its description
        made.kept._description += "".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return made


def build(directory, mode="all", drafts="none", **flags):
    config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | DRAFTS[drafts] | flags))
    return assemble(config, model(directory), programs=programs(directory, drafts) if not flags else None)


def run(engine, prompt, **more):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
    output = engine.add_request(f"{len(prompt)} {id(more)}", {"prompt_token_ids": prompt}, params, **more)
    finish(engine)
    return output


def assert_expected(directory, output):
    """Each token and its log-probability are what the model says of the whole sequence, without slots and pages."""
    choice = output.outputs[0]
    said = log_probs(model(directory), [*output.prompt_token_ids, *choice.token_ids], 64)[-11:-1]
    own = said[np.arange(10), choice.token_ids]
    assert (said.max(axis=1) - own < 1e-4).all()
    np.testing.assert_allclose(chosen_logprobs(choice), own, atol=1e-4)


def test_the_operation_equals_its_definition():
    """Of whole sequences: engines compare tiles and steps with these."""
    rng = np.random.default_rng(0)
    x, rate = rng.standard_normal((11, 2, 3)).astype(np.float32), np.float32([0.1, 0.7])
    dt = np.ones((11, 2), np.float32)
    y, _ = reference.average(x, dt, rate, np.zeros((2, 3)))
    whole, _ = SequenceLayout.of(1, 11).run(AVERAGE, (jnp.asarray(x), jnp.asarray(dt)), (jnp.asarray(rate),), None)
    np.testing.assert_allclose(whole, y, atol=1e-5)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="'mamba2' is taken"):
        families.register(dataclasses.replace(FAMILY, name="Another", model_types=("mamba2",)))


@pytest.mark.smoke
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_prefixes_are_reused_in_every_mode(directory, mode, drafts):
    engine = build(directory, mode, drafts).engine
    cold, warm = run(engine, PROMPT), run(engine, PROMPT)
    assert_expected(directory, cold)
    assert_expected(directory, warm)
    assert cold.num_cached_tokens == 0
    assert (warm.num_cached_tokens > 0) == (mode != "none")
    longer = run(engine, [*PROMPT[: 2 * BLOCK], 1, 2, 3])
    assert (longer.num_cached_tokens >= BLOCK) == (mode != "none")
    engine.loop.scheduler.check(idle=True)


@pytest.mark.smoke
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("handoff", ["full", "recompute-last"])
def test_prefill_and_decode_apart(directory, handoff, drafts):
    first, second = build(directory), build(directory, drafts=drafts)
    sides = [Worker(built, {"direct": DirectTransport("toy")}, model="toy") for built in (first, second)]
    prefill, decode = PrefillSide(sides[0]), DecodeSide(sides[1])
    assert "average" in sides[0].manifest.state
    fed, export = fed_tokens(PROMPT, handoff), prefill.begin()
    output = first.engine.add_request("there", {"prompt_token_ids": fed}, ONCE, export=export)
    finish(first.engine)
    ticket = prefill.ticket(export, PROMPT, handoff, cached_tokens=output.num_cached_tokens)
    assert_expected(directory, run(second.engine, PROMPT, remote=decode.accept(prefill, ticket)))
    assert decode.stats.arrived == 1


@pytest.mark.full
def test_divided_over_two_devices(directory):
    built = build(directory, tensor_parallel_size=2)
    (average, _) = built.engine.loop.store.slots
    assert average["average"].sharding.shard_shape(average["average"].shape)[1] == 2
    assert_expected(directory, run(built.engine, PROMPT))


def test_plan_and_inspect(directory):
    flags = EngineConfig.create(model=directory, max_model_len=4096)
    made = make_plan(flags, target("v5e-4"), compile=False)
    assert made.fits
    # Two layers of 1 head of 8 channels on each of 4 devices, padded to 128 lanes, in float32; and the hidden state.
    assert made.size.bytes_per_slot == 2 * 128 * 4 + 32 * 2
    shown = CliRunner().invoke(app, ["inspect", "--model", directory])
    assert shown.exit_code == 0
    assert "A-*-A-" in shown.output
    assert f"{2 * 32 * 4 + 32 * 4} bytes" in shown.output
