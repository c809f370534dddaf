"""A store whose arrays are pinned to an order of axes, as on TPU, serves the same; a CPU can be told to pin as well."""

import dataclasses
import math
from functools import partial

import jax
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from checkpoints.load import load_config
from mamba_jax import store_layout
from mamba_jax.programs import StepPrograms
from mamba_jax.store import StoreShape, init_store, store_bytes
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import QUICK_COMPILE

PROMPTS = [[7, 8, 9, 10] * 9, [7, 8, 9, 10] * 9 + [11]]


@pytest.fixture
def pinning(monkeypatch):
    monkeypatch.setitem(store_layout._LANES, "cpu", 128)


def tokens_of(harness, programs=None):
    engine = harness.engine("all", programs=programs, max_num_seqs=2)
    outputs = harness.run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def test_only_short_last_axes_are_pinned(harness, pinning):
    store = store_layout.init_laid_out(harness.model.config, num_slots=3, num_pages=3, page_size=8, dtype="float32")
    shape = StoreShape.of(harness.model.config)
    assert store_layout.is_pinned(shape, store)
    pinned = [leaf for leaf in jax.tree.leaves(store_layout.places(shape, store)) if isinstance(leaf, Format)]
    assert len(pinned) == len(store.slots) + len(store.kv)


def test_nothing_is_pinned_elsewhere(harness):
    store = init_store(harness.model.config, num_slots=3, num_pages=3, page_size=8, dtype="float32")
    shape = StoreShape.of(harness.model.config)
    assert not store_layout.is_pinned(shape, store)
    assert not store_layout.is_pinned(shape, jax.eval_shape(lambda: store))


@pytest.mark.full
def test_a_pinned_store_serves_the_same(harness, pinning):
    plain = tokens_of(harness)
    options = {"compiler_options": QUICK_COMPILE, "greedy": True}
    programs = StepPrograms(harness.model, tile_size=harness.programs.tile_size, **options)
    assert tokens_of(harness, programs) == plain
    assert programs.compilations > 0


def test_padding_is_counted(harness):
    shape = StoreShape.of(harness.model.config)
    store = init_store(shape, num_slots=4, num_pages=4, page_size=8, dtype="float32")
    assert 4 * (shape.bytes_per_slot("float32") + shape.bytes_per_page(8, "float32")) == store_bytes(store)
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
