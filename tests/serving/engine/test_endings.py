"""Requests that cannot go on end by themselves, at once, with an error that says why; their neighbors go on."""

import random
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from serving import SamplingParams
from serving.core.cache.content import Scope
from tests.support.engines.engines import finish
from tests.support.engines.spoiled_store import spoiled
from tests.support.engines.step_programs import shared_programs

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("kind", ["seat", "decode", "masks"])
def test_a_row_that_has_no_arrays_ends_its_own_request(harness, monkeypatch, kind):
    engine = harness.engine("all")
    good, bad, other = ({"prompt_token_ids": [3 + i] * (9 + i)} for i in range(3))
    neighbors = [good["prompt_token_ids"], other["prompt_token_ids"]]
    expected = [output.outputs[0].token_ids for output in harness.run(harness.engine("all"), neighbors, GREEDY)]

    def named(rows) -> bool:
        return any(getattr(row, "request", row).request_id == "bad" for row in rows)

    loop = engine.loop
    owner = loop.batches if kind == "decode" else loop
    sound = getattr(owner, kind)

    def broken(rows, *rest):
        if named([rows] if kind == "seat" else rows.rows if kind == "masks" else rows):
            raise OverflowError("too large for an array")
        return sound(rows, *rest)

    monkeypatch.setattr(owner, kind, broken)
    outputs = [engine.add_request(name, prompt, GREEDY) for name, prompt in (("a", good), ("bad", bad), ("b", other))]
    finish(engine)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "too large for an array" in outputs[1].outputs[0].stop_reason
    for prompt, output, tokens in zip(neighbors, outputs[::2], expected, strict=True):
        harness.assert_greedy(prompt, output.outputs[0].token_ids, tokens)
    loop.scheduler.check(idle=True)


def test_a_plan_that_fails_as_a_whole_is_tried_again_and_then_given_up(harness, monkeypatch):
    engine = harness.engine("all")
    sound, left = engine.loop.batches.prefill, [2]

    def broken(rows):
        if len(rows) > 1 and left[0]:
            left[0] -= 1
            raise ValueError("not together")
        return sound(rows)

    monkeypatch.setattr(engine.loop.batches, "prefill", broken)
    outputs = harness.run(engine, [[5, 6, 7], [8, 9]], GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]
    left[0] = 100
    outputs = harness.run(engine, [[15, 6, 7], [18, 9]], GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
    monkeypatch.undo()
    assert harness.run(engine, [[15, 6, 7], [18, 9]], GREEDY)[1].outputs[0].finish_reason == "length"


def test_a_fault_that_stays_is_reported_and_later_requests_run(harness):
    engine = harness.engine("all")
    engine.loop.fault = Mock(side_effect=RuntimeError("device lost"))
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="device lost"):
        finish(engine)
    engine.abort_all()
    engine.loop.fault = None
    (output,) = harness.run(engine, [[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_an_interrupt_between_dispatch_and_result_leaves_a_working_engine(harness):
    engine, rng = harness.engine("all"), random.Random(5)
    prompts = [harness.prompt(rng, length) for length in (1, 17, 64, 97)]
    expected = [output.outputs[0].token_ids for output in harness.run(harness.engine("none"), prompts, GREEDY)]

    def interrupt(plan):
        if engine.loop.stats.steps == 3:
            engine.loop.fault = None
            raise KeyboardInterrupt

    engine.loop.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        harness.run(engine, prompts, GREEDY)
    engine.abort_all()
    engine.loop.scheduler.check(idle=True)
    for prompt, tokens, output in zip(prompts, expected, harness.run(engine, prompts, GREEDY), strict=True):
        harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids)


# -- logits that are not numbers --

BAD = 7


@pytest.fixture(scope="module")
def broken_embedding(harness):
    """Programs of a model in which token `BAD` is NaN."""
    model = nnx.clone(harness.model)
    model.embed.weight[...] = model.embed.weight[...].at[BAD].set(jnp.nan)
    return shared_programs(model, tile_size=harness.flags["tile_size"])


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_an_output_that_is_not_finite_ends_and_leaves_nothing(harness, broken_embedding, mode):
    engine = harness.engine(mode, programs=broken_embedding)
    prefix = [(3 + i) % 50 + 8 for i in range(70)]
    prompts = [prefix, [*prefix[:40], BAD, *prefix[40:70]], prefix[:33]]
    expected = [o.outputs[0].token_ids for o in harness.run(harness.engine("none"), prompts, GREEDY)]
    outputs = harness.run(engine, prompts, GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "not finite" in outputs[1].outputs[0].stop_reason
    assert outputs[1].outputs[0].token_ids == []
    for i in (0, 2):
        harness.assert_greedy(prompts[i], outputs[i].outputs[0].token_ids, expected[i])
    assert engine.stats()["loop"]["not_finite"] == 1
    assert engine.stats()["finished"]["error"] == 1
    index = engine.loop.scheduler.index
    if index is not None:
        match = index.find(prompts[1], Scope(None))
        assert match.entry is None or match.entry.position <= 40
        assert match.matched <= 40


@pytest.mark.parametrize("mode", ["align", "all"])
def test_states_that_were_spoiled_on_the_device_are_forgotten(harness, mode):
    engine = harness.engine(mode)
    prompt = [(5 * i) % 50 + 8 for i in range(70)]
    (first,) = harness.run(engine, [prompt], GREEDY)
    assert not engine.stats()["cached_tokens"]

    engine.loop.replace_store(lambda store: jax.tree.map(spoiled, store))
    (second,) = harness.run(engine, [[*prompt, 9]], GREEDY)
    assert engine.stats()["cached_tokens"]
    assert second.outputs[0].finish_reason == "error"
    # No later request reads these states.
    (third,) = harness.run(engine, [prompt], GREEDY)
    assert third.num_cached_tokens == 0
    harness.assert_greedy(prompt, third.outputs[0].token_ids, first.outputs[0].token_ids)
