"""Counts the instructions of a kernel as the TPU's own compiler schedules them: bundles, one a cycle.

`python tests/kernels_pallas/count_bundles.py KERNEL SLICE ROWS_OR_TILES STEPS` prints those of the kernel compiled for
one TPU at the sizes of Nemotron-H-8B (the delta rule's: Qwen3-Next-80B-A3B; the selective scan's: Falcon-Mamba-7B), all
branches and the pipeline's own included. A process of its own, because the compiler takes the setting that has it write
its schedule once only, when it is loaded.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def count_bundles(kernel: str, slice_name: str, rows: int, steps: int = 1) -> int:
    """As the module says; skips the test where there is no compiler."""
    import pytest

    pytest.importorskip("libtpu")
    with tempfile.TemporaryDirectory() as folder:
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        subprocess.run(
            [sys.executable, __file__, kernel, slice_name, str(rows), str(steps)],
            # A program from a cache is not compiled, and so not written.
            env={**os.environ, "LIBTPU_INIT_ARGS": options, "JAX_ENABLE_COMPILATION_CACHE": "0"},
            check=True,
        )
        (analysis,) = Path(folder).glob(f"*{kernel}*schedule-analysis_final_bundles.txt")
        return int(re.search(r"total scheduled bundles:\s+(\d+)", analysis.read_text())[1])


def _compile(kernel: str, slice_name: str, rows: int, steps: int) -> None:
    sys.path.append(str(Path(__file__).parents[2]))  # of `tests.support`
    import test_selective_compile as selective
    import test_tpu_compile_delta as delta
    from real_shapes import MODELS, gated_scan_call, replay_call, scan_call, update_call
    from test_tpu_compile import GATED_STORES, STORE, between_projections, scan, update
    from test_tpu_compile_replay import DONATED, compiled
    from topology import compile_for_tpu

    if kernel == "state_replay":
        compiled(slice_name, replay_call(MODELS[0], rows, steps, 16), 16)
    elif kernel == "delta_replay":
        compile_for_tpu(slice_name, delta.replay, *delta.replay_call(delta.NEXT, rows, steps), donate=DONATED)
    elif kernel == "delta_scan":
        compile_for_tpu(slice_name, delta.scan, *delta.scan_call(delta.NEXT, rows), donate=delta.STORE)
    elif kernel == "selective_scan":
        compile_for_tpu(slice_name, selective.scan, *selective.scan_call(selective.INNER, rows), donate=STORE)
    elif kernel == "selective_update":
        compile_for_tpu(
            slice_name, selective.update, *selective.update_call(selective.INNER, rows, steps), donate=STORE
        )
    elif kernel == "gated_scan":
        compile_for_tpu(slice_name, between_projections, *gated_scan_call(MODELS[0], rows), donate=GATED_STORES)
    elif kernel == "ssd_scan":
        compile_for_tpu(slice_name, scan, *scan_call(MODELS[0], rows), donate=STORE)
    else:
        compile_for_tpu(slice_name, update, *update_call(MODELS[0], rows, steps), donate=STORE)


if __name__ == "__main__":
    _compile(*sys.argv[1:3], *map(int, sys.argv[3:]))
