"""Decode programs with quantised weights, by the TPU's own compiler: weights are read once, as narrow as they lie.

A few layers of real widths stand for a whole model. A wide copy of a weight would be written and read again: four times
the bytes of int8 on top, and eight times those of 4 bits.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from checkpoints.load import load_config
from checkpoints.placing import abstract_parameters
from mamba_jax.batch import DecodeBatch
from mamba_jax.model import HybridModel
from mamba_jax.modules.quantised import weight_of
from mamba_jax.rounding import NarrowDtype
from mamba_jax.rows import init_rows
from mamba_jax.sharding import Partition
from mamba_jax.store import StoreShape, init_store
from serving.capacity.compiling import SlicePrograms, slice_mesh
from serving.capacity.count import Counter
from serving.capacity.targets import target
from tests.support.compiled_programs import measured
from tests.support.narrow_parameters import narrow_parameters
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

ROWS, SLOTS, PAGES, PAGE = 16, 300, 1000, 32
DENSE, EXPERTS = ("nemotron-h-8b", "M*-"), ("nemotron-3-nano-30b-a3b", "ME*E")
KINDS = {"v5e-1": ("int8", "int4"), "v6e-1": ("int8", "int4"), "tpu7x-8": ("fp8", "nvfp4")}
FEW = [(*DENSE, "v5e-1", "int8"), (*EXPERTS, "tpu7x-8", "nvfp4")]
REST = [(*model, machine, kind) for model in (DENSE, EXPERTS) for machine in KINDS for kind in KINDS[machine]]
CASES = FEW + [slow(*each) for each in REST if each not in FEW]


def decode_program(config, machine, parameters, **sizes):
    """What the compiler says about a decode step."""
    slice_ = target(machine)
    shape = Partition.of(config, slice_.count).store_shape(StoreShape.of(config))
    sizes = {"num_slots": SLOTS, "num_pages": PAGES, "page_size": PAGE, "dtype": jnp.bfloat16} | sizes
    compiler = SlicePrograms(
        HybridModel.from_parameters(config, parameters),
        slice_mesh(slice_),
        store=jax.eval_shape(partial(init_store, shape, **sizes)),
        rows=jax.eval_shape(partial(init_rows, config, max_num_seqs=ROWS)),
        tile_size=128,
    )
    batch = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=32)
    program = measured(compiler, batch)
    return program


@pytest.mark.parametrize(("model", "pattern", "machine", "kind"), CASES)
def test_weights_are_read_once_and_narrow(model, pattern, machine, kind):
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config(model), pattern=pattern, mtp_pattern="", vocab_size=1024)
    partition = Partition.of(config, target(machine).count)
    narrow = narrow_parameters(config, partition, kind)
    assert sum(weight_of(path) is not None for path in narrow) >= 10
    program = decode_program(config, machine, narrow)
    size = Counter(config, partition, narrow, ssm_dtype=jnp.dtype("float32")).weight_bytes
    print(f"{program.weights:,} bytes of weights of {size:,}; {program.temporaries:,} of temporaries")
    # (Of the embedding, some rows alone are read.)
    assert 0.95 * size <= program.weights <= 1.1 * size
    assert program.temporaries < 16e6


@pytest.mark.parametrize("machine", ["v5e-1", slow("v6e-1"), slow("tpu7x-8")])
def test_pages_in_8_bits_are_updated_in_place(machine):
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config("nemotron-h-8b"), pattern="*-*", mtp_pattern="", vocab_size=1024)
    wide = abstract_parameters(config, jnp.bfloat16)
    program = decode_program(config, machine, wide, num_pages=20 * PAGES, kv_dtype=jnp.float8_e4m3fn)
    slice_ = target(machine)
    shape = Partition.of(config, slice_.count).store_shape(StoreShape.of(config))
    pages = 20 * PAGES * shape.bytes_per_page(PAGE, jnp.float8_e4m3fn) // slice_.count
    assert program.aliased >= pages
    assert program.temporaries < pages / 8


@pytest.mark.parametrize("machine", ["v5e-1", slow("tpu7x-8")])
def test_states_are_rounded_where_they_lie(machine):
    """Exact reuse: the slots that are due, and no copy of the store."""
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config("nemotron-h-8b"), pattern="MM", mtp_pattern="", vocab_size=1024)
    wide = abstract_parameters(config, jnp.bfloat16)
    program = decode_program(config, machine, wide, rounding=(NarrowDtype("int8"), 256))
    slice_ = target(machine)
    shape = Partition.of(config, slice_.count).store_shape(StoreShape.of(config))
    slots = SLOTS * shape.bytes_per_slot(jnp.bfloat16) // slice_.count
    assert program.aliased >= slots / 2
    assert program.temporaries < slots / 16
