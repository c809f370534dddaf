"""Counts the instructions of a kernel as the TPU's own compiler schedules them: bundles, one a cycle.

They are those of the kernel compiled for one TPU at the first of its sizes in `model_shapes.py` (those of
Nemotron-H-8B, Qwen3-Next-80B-A3B or Falcon-Mamba-7B) with some changes, such as `rows=64, steps=4`, and `erase=1` for
the second; all branches and the pipeline's own are included. A process of its own compiles it, because the compiler
takes the setting that has it write its schedule once only, when it is loaded.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def count_bundles(kernel: str, slice_name: str, **sizes: int) -> int:
    """Returns the number; skips the test where there is no compiler."""
    import pytest

    pytest.importorskip("libtpu")
    with tempfile.TemporaryDirectory() as folder:
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        subprocess.run(
            [sys.executable, __file__, kernel, slice_name, *(f"{name}={size}" for name, size in sizes.items())],
            # A program from a cache is not compiled, and so not written.
            env={**os.environ, "LIBTPU_INIT_ARGS": options, "JAX_ENABLE_COMPILATION_CACHE": "0"},
            check=True,
        )
        (analysis,) = Path(folder).glob(f"*{kernel}*schedule-analysis_final_bundles.txt")
        return int(re.search(r"total scheduled bundles:\s+(\d+)", analysis.read_text())[1])


def _compile(kernel: str, slice_name: str, *sizes: str) -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # of `tests.support` and `benchmarks`
    from model_calls import OPERATIONS, call_of, program
    from topology import compile_for_tpu

    changes = {name: int(size) for name, size in (one.split("=") for one in sizes)}
    erase = bool(changes.pop("erase", 0))
    first = next(shape for shape in OPERATIONS[kernel][2] if getattr(shape, "erase", False) == erase)
    call = call_of(kernel, dataclasses.replace(first, **changes))
    compile_for_tpu(slice_name, program(call, "pallas_tpu"), *call.apart(call.arrays), donate=0)


if __name__ == "__main__":
    _compile(*sys.argv[1:])
