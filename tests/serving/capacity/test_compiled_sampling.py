"""Drawing tokens within top-k and top-p, compiled for machines that are not at hand: how often it reads the logits."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mamba_jax.programs import platform_options
from mamba_jax.sampling import SamplingInputs, init_sampling_table
from mamba_jax.sampling.draw_tokens import draw
from serving.capacity.compiling import slice_mesh
from tests.support.compiled_programs import compilable
from tests.support.hlo_traffic import Traffic
from tests.support.selection import slow

pytestmark = pytest.mark.full
ROWS, HEADS, VOCAB = 64, 4, 131072


def compiled_draw(topology):
    machine = compilable(topology)
    place = SingleDeviceSharding(slice_mesh(machine).devices.flat[0])

    def described(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def run(logits, row_id, length, table):
        nothing = jnp.zeros((1, 1), jnp.int32)
        drafts = jnp.full((ROWS, HEADS - 1), -1)
        some = jnp.ones(ROWS, bool)
        asked = SamplingInputs.of(drafts, length * 0, length, some, row_id, table, nothing, nothing > 0)
        return draw(logits, asked)

    table = jax.tree.map(lambda x: described(x.shape, x.dtype), jax.eval_shape(lambda: init_sampling_table(ROWS + 1)))
    ints = described((ROWS,), jnp.int32)
    options = {"xla_gpu_autotune_level": 0} if machine.device.platform == "gpu" else {}
    lowered = jax.jit(run).lower(described((ROWS * HEADS, VOCAB), jnp.float32), ints, ints, table)
    compiled = lowered.compile(platform_options(machine.device.platform) | options)
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, 4 * ROWS * HEADS * VOCAB


@pytest.mark.gpu_compile
def test_limits_take_three_passes_on_gpu():
    text, temporaries, logits = compiled_draw("h200-1")
    # Loops over heads that the largest logits do not decide have no known number of rounds, and count nothing.
    assert Traffic(text).total() < 3.6 * logits
    assert temporaries < 0.4 * logits


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v6e-1", slow("v5e-1")])
def test_passes_over_some_heads_stay_on_the_chip_of_a_tpu(topology):
    text, temporaries, logits = compiled_draw(topology)
    assert temporaries < 0.1 * logits
    # The slice of eight heads is written to a memory of the chip, S(1), as are the weights of every pass.
    assert re.search(r"f32\[8,131072\]\{[^}]*S\(1\)\} fusion", text)
    assert not re.search(r"= f32\[8,(1,)?131072\]\{(?![^}]*S\(1\))[^}]*\} fusion", text)
