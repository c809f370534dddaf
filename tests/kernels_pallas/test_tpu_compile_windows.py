"""Reading and writing windows compiled by the TPU's own compiler: in place, and nothing of other slots moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from real_shapes import BF16, F32, nbytes, shape
from topology import SLICES, tpu_devices

from kernels_pallas.windows import read_windows, write_windows
from tests.support.hlo_traffic import Traffic
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

FEW = [("v5e", 890, 3, 1024, 64, BF16), ("v6e", 300, 3, 8192, 256, BF16)]
ALL = [
    (name, 600, rows, channels, count, dtype)
    for name in SLICES
    for rows, channels in ((3, 256), (3, 1024), (2, 2048), (1, 128), (5, 512), (8, 1024))
    for count, dtype in ((1, BF16), (48, BF16), (512, BF16), (64, F32))
]


@pytest.mark.parametrize(
    ("slice_name", "slots", "rows", "channels", "count", "dtype"),
    [*FEW, *(slow(*case) for case in ALL)],
)
def test_only_what_is_named_moves(slice_name, slots, rows, channels, count, dtype):
    device = tpu_devices(slice_name)[0]
    place = SingleDeviceSharding(device)
    by_slots = Format(Layout((0, 1, 2)), place)
    store = jax.ShapeDtypeStruct((slots, rows, channels), dtype, sharding=by_slots)
    index = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=place)

    def turn(store, read, write):
        found = read_windows(store, read, implementation="pallas_tpu")
        # In a tuple, as steps give it: a program that gives nothing but the store does not compile.
        return write_windows(store, jnp.roll(2 * found, 1, axis=0), write, implementation="pallas_tpu"), read + 1

    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        run = jax.jit(turn, donate_argnums=0, out_shardings=(by_slots, None))
        compiled = run.lower(store, index, index).compile()
    memory, window = compiled.memory_analysis(), nbytes(shape(rows, channels, dtype=dtype))
    assert slots * window <= memory.alias_size_in_bytes <= 2 * slots * window  # a few rows are padded
    # Read once and written once, and on the way at most a few times more, where they do not fit on the chip.
    padded = window * memory.alias_size_in_bytes / (slots * window)
    assert memory.temp_size_in_bytes <= max(4 * count * padded, 1 << 20)
    assert Traffic(compiled.as_text()).total() <= (2.1 if count <= 64 else 8) * count * padded + 1e5
