"""Requests are served as soon as the widest programs are there; narrower ones take over as they come."""

import dataclasses
import logging
import math
import random
import threading
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from checkpoints.load import load_config
from mamba_jax import store_layout
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.programs import StepPrograms
from mamba_jax.store import StoreShape, init_store
from serving.config import EngineConfig
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps import warm_up as module
from serving.engine.steps.warm_up import WarmUpStopped, warm_up
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.selection import full_tier

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def start(harness, mode):
    """An engine with programs of all shapes."""
    return harness.build(EngineConfig.create(mamba_cache_mode=mode, **harness.flags)).engine


@pytest.fixture
def watched(harness, monkeypatch):
    """An engine, the shapes that its steps run by, what lets its compiling thread go on, and errors by shape."""
    engine = start(harness, "none")
    programs, go_on, shapes, errors = engine.loop.programs, threading.Event(), [], {}
    compile, step = programs.program, programs.step

    def compile_later(store, rows, batch):
        if threading.current_thread().name == "compiling":
            go_on.wait(300)
        if isinstance(batch, PrefillBatch | DecodeBatch) and batch.tokens.shape in errors:
            raise RuntimeError(errors[batch.tokens.shape])
        return compile(store, rows, batch)

    def watch(store, rows, batch):
        shapes.append(batch.tokens.shape)
        return step(store, rows, batch)

    monkeypatch.setattr(programs, "program", compile_later)
    monkeypatch.setattr(programs, "step", watch)
    yield engine, shapes, go_on, errors
    engine.loop.leaving.set()
    go_on.set()
    wait_for_programs()


def wait_for_programs():
    for thread in threading.enumerate():
        if thread.name == "compiling":
            thread.join(300)


def test_steps_run_by_wider_programs_until_the_narrower_ones_are_there(harness, watched, caplog):
    """The log says what is coming and when it is there."""
    engine, shapes, go_on, _ = watched
    batches = engine.loop.batches
    caplog.set_level(logging.INFO, logger="serving")
    warm_up(engine.loop, harness.vocab_size, progress=False, background=True)
    (coming,) = [record.message for record in caplog.records if "in the background" in record.message]
    assert "decode of 1 x 1" in coming
    compiled = engine.loop.programs.compilations
    prompt = harness.prompt(random.Random(1), 5)
    (wide,) = harness.run(engine, [prompt], PARAMS)
    widest = {(batches.prefill_shapes[-1].tokens,), (batches.decode_shapes[-1], 1)}
    assert set(shapes) == widest
    assert engine.loop.programs.compilations == compiled
    assert "(all)" not in caplog.text
    go_on.set()
    wait_for_programs()
    assert "programs (all) ready" in caplog.text
    compiled = engine.loop.programs.compilations
    shapes.clear()
    (narrow,) = harness.run(engine, [prompt], PARAMS)
    assert set(shapes) == {(batches.prefill_shapes[0].tokens,), (1, 1)}
    assert engine.loop.programs.compilations == compiled
    assert narrow.outputs[0].token_ids == wide.outputs[0].token_ids


def test_a_narrower_program_that_cannot_be_compiled_stops_no_request(harness, watched):
    engine, shapes, go_on, errors = watched
    errors[1, 1] = "no memory"
    go_on.set()
    warm_up(engine.loop, harness.vocab_size, progress=False, background=True)
    wait_for_programs()
    compiled = engine.loop.programs.compilations
    (output,) = harness.run(engine, [harness.prompt(random.Random(2), 5)], PARAMS)
    assert output.outputs[0].finish_reason == "length"
    assert (engine.loop.batches.decode_shapes[1], 1) in shapes
    assert engine.loop.programs.compilations == compiled


def test_a_step_that_does_not_fit_is_halved_and_a_narrower_one_is_left_out(harness, watched, caplog):
    engine, shapes, _, errors = watched
    widest = engine.loop.batches.prefill_shapes[-1].tokens
    errors[widest,] = errors[1, 1] = "RESOURCE_EXHAUSTED: as a device reports it"
    warm_up(engine.loop, harness.vocab_size, progress=False)
    assert f"steps take {widest // 2} prompt tokens" in caplog.text
    assert "no memory for the program decode of 1 x 1" in caplog.text
    compiled = engine.loop.programs.compilations
    prompts = [harness.prompt(random.Random(i), widest - 3) for i in range(2)]
    outputs = harness.run(engine, prompts, PARAMS)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert max(shape for shape in shapes if len(shape) == 1) == (widest // 2,)
    assert (1, 1) not in shapes
    assert engine.loop.programs.compilations == compiled


def test_compiling_ends_with_the_engine(harness, watched):
    engine, shapes, go_on, _ = watched
    warm_up(engine.loop, harness.vocab_size, progress=False, background=True)
    engine.loop.leaving.set()
    go_on.set()
    wait_for_programs()
    harness.run(engine, [harness.prompt(random.Random(3), 5)], PARAMS)
    assert (engine.loop.batches.prefill_shapes[-1].tokens,) in shapes


def test_a_warm_up_can_be_left(harness):
    loop = start(harness, "all").loop
    loop.leaving.set()
    compiled = loop.programs.compilations
    with pytest.raises(WarmUpStopped):
        warm_up(loop, harness.vocab_size, progress=False)
    assert loop.programs.compilations <= compiled + 4


def test_nothing_compiles_after_the_warm_up(harness, request):
    engine = start(harness, "all")
    warm_up(engine.loop, harness.vocab_size, progress=False)
    compiled = engine.loop.programs.compilations
    rng = random.Random(3)
    prompts = [harness.prompt(rng, rng.randrange(1, 101)) for _ in range(500 if full_tier(request.config) else 120)]
    values = {"temperature": [0.0, 1.0], "max_tokens": range(1, 6), "presence_penalty": [0.0, 0.5]}
    values |= {"logprobs": [None, 2], "prompt_logprobs": [None, None, 1]}
    params = [SamplingParams(**{name: rng.choice(each) for name, each in values.items()}) for _ in prompts]
    harness.run(engine, prompts, params)
    assert engine.loop.programs.compilations == compiled


def test_the_log_says_how_far_compiling_is_where_there_is_no_terminal(monkeypatch, caplog):
    monkeypatch.setattr(module, "LINE_EVERY", -1.0)
    memory = SimpleNamespace(generated_code_size_in_bytes=2**20, temp_size_in_bytes=2**21)
    monkeypatch.setattr(module, "_LOGGED_SECONDS", -1.0)
    batches = [DecodeBatch.empty(rows=size, num_speculative_tokens=0) for size in (1, 2)]
    loop = SimpleNamespace(
        batches=SimpleNamespace(warm_up_batches=lambda vocab_size: batches, num_essential=1),
        programs=SimpleNamespace(compilations=2, program=lambda *_: SimpleNamespace(memory_analysis=lambda: memory)),
        shapes=(None, None),
        leaving=threading.Event(),
    )
    with caplog.at_level(logging.INFO, logger="serving"):
        warm_up(loop, 10, progress=False)
    assert "compiling: 1 of 2 programs" in caplog.text
    assert "decode of 1 x 1: 0.0 s, 1.0 MiB of code, 2.0 MiB of temporary memory" in caplog.text


@pytest.fixture
def pinning(monkeypatch):
    monkeypatch.setitem(store_layout._LANES, "cpu", 128)


def test_only_short_last_axes_are_pinned_and_on_no_other_platform(harness, monkeypatch):
    config, shape = harness.model.config, StoreShape.of(harness.model.config)
    store = init_store(config, num_slots=3, num_pages=3, page_size=8, dtype="float32")
    assert not store_layout.is_pinned(shape, store)
    assert not store_layout.is_pinned(shape, jax.eval_shape(lambda: store))
    monkeypatch.setitem(store_layout._LANES, "cpu", 128)
    store = store_layout.init_laid_out(config, num_slots=3, num_pages=3, page_size=8, dtype="float32")
    assert store_layout.is_pinned(shape, store)
    pinned = [leaf for leaf in jax.tree.leaves(store_layout.places(shape, store)) if isinstance(leaf, Format)]
    assert len(pinned) == len(store.slots) + len(store.kv)


@pytest.mark.full
def test_a_pinned_store_serves_the_same(harness, pinning):
    prompts = [[7, 8, 9, 10] * 9, [7, 8, 9, 10] * 9 + [11]]
    plain = harness.run(harness.engine("all"), prompts, PARAMS)
    options = {"compiler_options": QUICK_COMPILE, "greedy": True}
    programs = StepPrograms(harness.model, tile_size=harness.programs.tile_size, **options)
    pinned = harness.run(harness.engine("all", programs=programs, max_num_seqs=2), prompts, PARAMS)
    for one, other in zip(pinned, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert programs.compilations > 0


def test_padding_is_counted(harness):
    shape = StoreShape.of(harness.model.config)
    padded = dataclasses.replace(shape, lanes=128)
    *rest, last = shape.arrays["ssm"].shape
    wide = math.prod(rest) * (128 - last) * 4 * len(shape.slots)
    assert padded.bytes_per_slot("float32") - shape.bytes_per_slot("float32") == wide


def test_windows_of_whole_registers_are_pinned_and_padded(pinning):
    """A slot's rows of them lie together; 3 of them take the place of 4."""
    config = load_config("mamba2-130m")
    shape = StoreShape.of(config)
    store = jax.eval_shape(partial(init_store, config, num_slots=3, num_pages=0, page_size=8, dtype="bfloat16"))
    where = store_layout.placed(shape, store, jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), store))
    windows = {name for arrays in where.slots for name, place in arrays.items() if isinstance(place, Format)}
    assert windows == {"conv_x", "conv_bc"}
    array = shape.arrays["conv_x"]
    assert array.size(128) * 3 == array.size() * 4
    assert array.inputs().size(128) == array.inputs().size()
    odd = dataclasses.replace(array, shape=(3, 200))
    assert odd.size(128) == 600
