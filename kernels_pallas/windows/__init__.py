"""Windows of a convolution's inputs, read from slots and written to them."""

from kernels_pallas.windows.api import read_windows, write_windows

__all__ = ["read_windows", "write_windows"]
