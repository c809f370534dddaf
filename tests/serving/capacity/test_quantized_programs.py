"""Decode programs with quantized weights, by the TPU's own compiler: weights are read once, as narrow as they lie.

A few layers of real widths stand for a whole model. A wide copy of a weight would be written and read again: four times
the bytes of int8 on top, and eight times those of 4 bits.
"""

import jax.numpy as jnp
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.modules.quantized import weight_of
from mamba_jax.rounding import NarrowDtype
from mamba_jax.sharding import Partition
from serving.capacity.count import Counter
from serving.capacity.targets import target
from tests.support.compiled_programs import compile_step, few_layers, narrow_parameters
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

ROWS = 16
STORE = {"num_slots": 300, "num_pages": 1000, "page_size": 32}
DENSE, EXPERTS = ("nemotron-h-8b", "M*-"), ("nemotron-3-nano-30b-a3b", "ME*")
KINDS = {"v5e-1": ("int8", "int4"), "v6e-1": ("int8", "int4"), "tpu7x-8": ("fp8", "nvfp4")}
FEW = [(*DENSE, "v5e-1", "int8"), (*EXPERTS, "tpu7x-8", "nvfp4")]
REST = [(*model, machine, kind) for model in (DENSE, EXPERTS) for machine in KINDS for kind in KINDS[machine]]
CASES = FEW + [slow(*each) for each in REST if each not in FEW]


def decode_step(config, machine, parameters=None, **sizes):
    """What the compiler says about a decode step."""
    batch, seats = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=32), {"max_num_seqs": ROWS}
    return compile_step(config, machine, batch, store=STORE | sizes, seats=seats, parameters=parameters)


@pytest.mark.parametrize(("model", "pattern", "machine", "kind"), CASES)
def test_weights_are_read_once_and_narrow(model, pattern, machine, kind):
    config = few_layers(model, pattern)
    partition = Partition.of(config, target(machine).count)
    narrow = narrow_parameters(config, partition, kind)
    assert sum(weight_of(path) is not None for path in narrow) >= 10
    program = decode_step(config, machine, narrow).program
    size = Counter(config, partition, narrow, ssm_dtype=jnp.dtype("float32")).weight_bytes
    print(f"{program.weights:,} bytes of weights of {size:,}; {program.temporaries:,} of temporaries")
    # (Of the embedding, some rows alone are read.)
    assert 0.95 * size <= program.weights <= 1.1 * size
    assert program.temporaries < 16e6


@pytest.mark.parametrize("machine", ["v5e-1", slow("v6e-1"), slow("tpu7x-8")])
def test_pages_in_8_bits_are_updated_and_states_rounded_where_they_lie(machine):
    """The slots that are due, and no copy of the store."""
    narrow = {"num_pages": 20_000, "kv_dtype": jnp.float8_e4m3fn, "rounding": (NarrowDtype("int8"), 256)}
    step = decode_step(few_layers("nemotron-h-8b", "M*"), machine, **narrow)
    assert step.program.aliased >= step.pages + step.states / 2
    assert step.program.temporaries < min(step.pages / 8, step.states / 16)
