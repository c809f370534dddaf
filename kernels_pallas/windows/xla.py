"""Windows in plain JAX: read and written as any slots are."""

from kernels_pallas.slots import read_slots, write_slots


def read_windows(store, index):
    """See `api.read_windows`."""
    return read_slots(store, index)


def write_windows(store, values, index, *, share):
    """See `api.write_windows`."""
    return write_slots(store, values, index)
