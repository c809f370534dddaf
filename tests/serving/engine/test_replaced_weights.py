"""Weights that change while an engine runs: what is said, by which of them, what is refused, and what is held."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.load import load_model
from checkpoints.random import random_tensors, write_random
from mamba_jax.model import parameters
from serving import LLM, RequestError, SamplingParams
from serving.state_transfer import identity
from tests.support.engines.engine_harness import SMALL
from tests.support.engines.engines import finish
from tests.support.engines.small_tiers import Free
from tests.support.engines.versioned_engine import VersionedEngine
from tests.support.models.golden_case import chosen_logprobs, log_probs
from tests.support.models.tiny_configs import TRAINABLE
from tests.support.selection import slow

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = SMALL
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPT = {"prompt_token_ids": [5, 9, 2, 33, 7] * 8}


@pytest.fixture(scope="module", autouse=True)
def stored_digests(_stored_programs):
    sound, identity._digest = identity._digest, jax.jit(identity._digest.__wrapped__)
    yield
    identity._digest = sound


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory for each seed."""
    return lambda seed: write_random(tmp_path_factory.getbasetemp() / f"weights-{seed}", TRAINABLE, seed=seed)


def assert_says(llm, directory, *, version, tolerance=2e-4):
    """The engine's next output is that of the model in a directory."""
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    (choice,) = output.outputs
    tokens, before = [*output.prompt_token_ids, *choice.token_ids], len(output.prompt_token_ids)
    scores = log_probs(load_model(directory, progress=False), tokens)[before - 1 : -1]
    np.testing.assert_allclose(chosen_logprobs(choice), scores[np.arange(8), choice.token_ids], atol=tolerance)
    assert choice.weights_versions == [(version, 8)]
    return output


def test_weights_come_by_either_names_from_memory_or_a_directory(checkpoint):
    llm = LLM(checkpoint(0), **FLAGS)
    for _ in range(2):  # the second finds the whole prompt in the cache, and compiles the programs for that
        assert_says(llm, checkpoint(0), version="0")
    compiled = llm.compilations
    by_path = {path: leaf.get_value() for path, leaf in parameters(load_model(checkpoint(1), progress=False)).items()}
    assert llm.update_weights(by_path) == llm.weights_version == "1"
    for value in by_path.values():
        value.delete()  # as a trainer that donates its weights does
    assert assert_says(llm, checkpoint(1), version="1").num_cached_tokens == 0
    tensors = random_tensors(TRAINABLE, 2)
    llm.update_weights(((name, tensor.astype(np.float16)) for name, tensor in tensors.items()), version="step 2")
    assert_says(llm, checkpoint(2), version="step 2", tolerance=0.05)
    llm.update_weights(checkpoint(3), version=3)
    output = assert_says(llm, checkpoint(3), version="3")
    assert output.miss_reason == "weights changed: the prefix was cached under the weights before"
    assert assert_says(llm, checkpoint(3), version="3").num_cached_tokens == len(PROMPT["prompt_token_ids"])
    own = {path: np.asarray(leaf.get_value()) for path, leaf in parameters(llm.model).items()}
    held = {path: np.asarray(value) for path, value in llm.engine.loop.programs.weights.items()}
    jax.tree.map(np.testing.assert_array_equal, own, held)
    assert llm.compilations == compiled


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(checkpoint):
    llm = LLM(checkpoint(0), **FLAGS)
    good = random_tensors(TRAINABLE, 1)
    name = "backbone.layers.0.mixer.D"
    assert name in good
    for change, message in (
        ({name: np.zeros(3, np.float32)}, rf"{name} is \[3\], expected \[4\]"),
        ({name: np.zeros(4, np.int32)}, f"{name} is int32"),
        ({name: [1.0] * 4}, f"{name} is list"),
        ({"backbone.layers.0.mixer.Q": np.zeros(4, np.float32)}, r"unexpected: backbone.layers.0.mixer.Q \[4\]"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.update_weights(good | change)
    with pytest.raises(RequestError, match=rf"missing: {name} \[4\]"):
        llm.update_weights({other: value for other, value in good.items() if other != name})
    with pytest.raises(RequestError, match=f"{name} comes twice"):
        llm.update_weights([*good.items(), (name, good[name])])
    with pytest.raises(RequestError, match="version '0' is in use"):
        llm.update_weights(good, version=0)
    with pytest.raises(RequestError, match="there are none"):
        llm.update_weights({}, partial=True)
    assert_says(llm, checkpoint(0), version="0")
    # Some may be replaced alone, if that is what is asked for.
    only = {name: good[name]}
    llm.update_weights(only, partial=True)
    np.testing.assert_array_equal(parameters(llm.model)["blocks.0.mixer.d"].get_value(), good[name])


@pytest.mark.full
@pytest.mark.parametrize("members", [1, 2])
def test_divided_weights_stay_divided(members, checkpoint):
    divided = LLM(checkpoint(0), tensor_parallel_size=2, context_parallel_size=members, **FLAGS)
    places = {path: value.sharding for path, value in divided.engine.loop.programs.weights.items()}
    divided.update_weights(checkpoint(1))
    assert_says(divided, checkpoint(1), version="1")
    assert {path: value.sharding for path, value in divided.engine.loop.programs.weights.items()} == places


@pytest.mark.smoke
@pytest.mark.parametrize("first", [1, 0])
@pytest.mark.parametrize(
    ("model", "dtype", "quantization"),
    [
        ("nemotronh-moe", "bfloat16", "nvfp4"), slow("nemotronh-moe", "bfloat16", "int8"),
        slow("qwen3next", "bfloat16", "nvfp4"), ("qwen3next", "float32", "fp8"), ("qwen3next", "bfloat16", "int4"),
    ],
)  # fmt: skip
def test_new_weights_are_rounded_as_loaded_ones(tmp_path, model, dtype, quantization, first):
    """From arrays by either names, of NumPy or JAX, and from a directory."""
    rng, directory = np.random.default_rng(3), tmp_path / "changed"
    tensors = {
        name: (value * rng.uniform(0.5, 1.5, value.shape)).astype(np.float32)
        for name, value in load_file(GOLDEN / model / "model.safetensors").items()
    }
    shutil.copytree(GOLDEN / model, directory, ignore=shutil.ignore_patterns("model.safetensors", "adapter"))
    save_file(tensors, directory / "model.safetensors")
    flags = FLAGS | {"dtype": dtype, "quantization": quantization, "quantization_exclude": "q_proj"}
    fresh = LLM(directory, **flags).weights_checksum()
    held = LLM(GOLDEN / model, **flags)
    assert any(path.endswith(".values") for path in fresh.weights)
    own = {path: leaf.get_value() for path, leaf in parameters(load_model(directory, dtype="float32")).items()}
    before = held.weights_checksum()
    kinds = (tensors, str(directory), own, {path: np.asarray(value) for path, value in own.items()})
    for given in kinds[first::2]:
        held.update_weights(given)
        found = held.weights_checksum()
        assert {path for path, digest in found.weights.items() if digest != fresh.weights[path]} == set()
        assert found.checksum == fresh.checksum != before.checksum
        held.update_weights(str(GOLDEN / model))
        assert held.weights_checksum().checksum == before.checksum


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "nvfp4"])
def test_a_refit_that_fails_keeps_the_rounded_weights(checkpoint, quantization):
    llm = LLM(checkpoint(0), quantization=quantization, **FLAGS)
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    before = llm.weights_checksum()
    good = random_tensors(TRAINABLE, 1)
    name = "backbone.layers.0.mixer.in_proj.weight"
    for value in (np.nan, np.inf, -np.inf):
        bad = good[name].copy()
        bad[3, 5] = value
        for kind in (np.asarray, jnp.asarray):
            with pytest.raises(RequestError, match=f"the new weights: 1 with NaN or infinity: {name}"):
                llm.update_weights(good | {name: kind(bad)})
    own = {path: leaf.get_value() for path, leaf in parameters(load_model(checkpoint(1), progress=False)).items()}
    part = {"blocks.0.mixer.in_proj_zx.weight": own["blocks.0.mixer.in_proj_zx.weight"]}
    if quantization == "nvfp4":
        with pytest.raises(RequestError, match=r"nvfp4 .*zx.weight together with .*send them in the same update"):
            llm.update_weights(part, partial=True)
    assert llm.weights_checksum() == before
    (again,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.outputs[0].logprobs == output.outputs[0].logprobs
    # And a refit that succeeds says what a fresh engine says.
    llm.update_weights(good)
    compiled, fresh = llm.compilations, LLM(checkpoint(1), quantization=quantization, **FLAGS)
    (output,), (expected,) = (each.generate(PROMPT, GREEDY, use_tqdm=False) for each in (llm, fresh))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.outputs[0].token_ids != again.outputs[0].token_ids
    assert llm.compilations == compiled


@pytest.mark.full
def test_five_hundred_requests_under_changing_weights():
    made = VersionedEngine(seed=1)
    compiled = made.compile(temperature=1.0)
    outputs = made.run(requests=500, update_every=12)
    assert made.engine.loop.programs.compilations == compiled
    made.engine.loop.scheduler.check(idle=True)
    assert made.engine.control.weights.updates > 20
    assert sum(output.num_cached_tokens for output in outputs) > 1000
    explained = made.explain(outputs)
    assert explained.tokens > 3000
    assert explained.worst < 2e-3
    assert explained.by_another / explained.tokens < 0.05
    assert sum(len(choice.weights_versions) > 1 for output in outputs for choice in output.outputs) > 50


@pytest.mark.full
@pytest.mark.parametrize("source", ["tiers", "replay"])
def test_nothing_stale_comes_from_tiers_or_by_replay(source, tmp_path):
    tiers = {"host_cache_gib": 0.01, "disk_cache": str(tmp_path), "disk_cache_gib": 0.1}
    made = VersionedEngine(seed=8, **(tiers if source == "tiers" else {"replay_interval": 4}))
    engine = made.engine
    if source == "tiers":
        engine.loop.scheduler.tiers.fetch_costs = Free()
    outputs = made.run(requests=120, update_every=40)
    explained = made.explain(outputs)
    assert explained.worst < 2e-3
    assert engine.control.weights.updates >= 3
    assert sum(output.num_cached_tokens for output in outputs) > 100
    assert (engine.loop.store.tails is not None) == (source == "replay")
    if source == "tiers":
        assert engine.stats()["tiers"]["host"]["arrived"] > 5
        host = engine.loop.scheduler.tiers.host
        # The last update may have come after the last request; these requests fill the tier again.
        made.run(requests=40, update_every=1_000_000)
        kept = len(host.units)
        made.update()
        assert kept > len(host.units) == 0
    engine.loop.scheduler.check(idle=True)
    engine.close()


def test_a_pause_keeps_aborts_or_waits():
    made = VersionedEngine(seed=4)
    engine, control = made.engine, made.engine.control
    long = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
    kept = engine.add_request("kept", {"prompt_token_ids": [1, 2, 3] * 5}, long)
    for _ in range(6):
        engine.step()
    control.pause("keep")
    said = len(kept.outputs[0].token_ids)
    assert [output.request_id for output in engine.step()] == ["kept"]
    assert (engine.busy, engine.step(), len(kept.outputs[0].token_ids)) == (False, [], said)
    made.update()
    control.resume()
    finish(engine)
    assert kept.outputs[0].weights_versions == [("0", said), ("1", 20 - said)]
    assert made.explain([kept]).worst < 2e-3

    aborted = engine.add_request("aborted", {"prompt_token_ids": [4, 5, 6] * 5}, long)
    for _ in range(6):
        engine.step()
    control.pause("abort")
    assert aborted in engine.step()
    assert aborted.outputs[0].finish_reason == "abort"
    control.resume()
    begun = [*aborted.prompt_token_ids, *aborted.outputs[0].token_ids]
    rest = engine.add_request("rest", {"prompt_token_ids": begun}, long)
    finish(engine)
    assert rest.num_cached_tokens > 0

    before = engine.add_request("before", {"prompt_token_ids": [7, 8] * 5}, long)
    control.pause("wait")
    after = engine.add_request("after", {"prompt_token_ids": [8, 7] * 5}, long)
    while engine.busy:
        engine.step()
    assert (before.finished, control.paused, after.finished, after.outputs[0].token_ids) == (True, True, False, [])
    control.resume()
    finish(engine)
    assert after.finished
    with pytest.raises(RequestError, match="'now' is not known; allowed are wait, abort, keep"):
        control.pause("now")


def test_sleep_gives_memory_back_and_requests_go_on():
    made = VersionedEngine(seed=5)
    engine, control = made.engine, made.engine.control
    compiled = made.compile()
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
    output = engine.add_request("long", {"prompt_token_ids": [1, 2, 3] * 5}, params)
    for _ in range(6):
        engine.step()
    store = sum(leaf.nbytes for leaf in jax.tree.leaves((engine.loop._store, engine.loop._rows)))
    weights = sum(value.nbytes for value in engine.loop.programs.weights.values())

    def held():
        return sum(array.nbytes for array in jax.live_arrays())

    awake = held()
    control.sleep(1)
    assert awake - held() >= store
    engine.step()  # says what the step in flight gave
    assert (engine.busy, control.why_held) == (False, "the engine sleeps: call wake_up() first")
    control.sleep(2)
    assert awake - held() >= store + weights
    control.wake_up()
    assert control.why_held == "the engine has no weights: call update_weights(...) first"
    with pytest.raises(RequestError, match="partial=True needs a complete set of weights"):
        control.update_weights({"embed.weight": np.zeros((96, 24), np.float32)}, partial=True)
    made.update()
    finish(engine)
    assert output.outputs[0].weights_versions[-1][0] == "1"
    assert made.explain([output]).worst < 2e-3
    assert engine.loop.programs.compilations == compiled
    engine.loop.scheduler.check(idle=True)
