"""What loading a checkpoint takes on the host: the model and one tensor, counted in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.random import write_random
from tests.support.models.quantized_checkpoints import METHODS, config_of, write_quantized
from tests.support.models.tiny_configs import CHECKPOINT

WIDE = CHECKPOINT | {"hidden_size": 512, "vocab_size": 24_000, "n_routed_experts": 64}
SIZES = {"hidden_size": 512, "n_routed_experts": 32, "moe_intermediate_size": 768, "vocab_size": 1024}
SLACK = 8e6
"""Of the allocator, and of a bar, threads and the like."""
MEASURE = """
import sys, jax, checkpoints
from mamba_jax.model import parameters
def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) * 1024
kind = sys.argv[2] or None
checkpoints.load_model("demo", quantization=kind, progress=False)
before = status("VmRSS")
# Sets the high-water mark back.
open("/proc/self/clear_refs", "w").write("5")
model = checkpoints.load_model(sys.argv[1], quantization=kind, progress=False)
sizes = [leaf.get_value().nbytes for leaf in parameters(model).values()]
print(sum(sizes), max(sizes), status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize(
    "kind", ["", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("modelopt FP8", "int8"))]
)
def test_peak_is_the_model_and_one_tensor(kind, tmp_path):
    config, quantization = config_of("moe") | SIZES, ""
    if kind in METHODS:
        description, formats = METHODS[kind]
        directory = write_quantized(tmp_path, config, formats, description)[0]
    else:
        quantization = kind
        directory = write_random(tmp_path / "wide", config if kind else WIDE, dtype="bfloat16")
    command = [sys.executable, "-c", MEASURE, str(directory), quantization]
    # Tensors of a real model are so large that the allocator gives them back as soon as they are freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    model, largest, peak = map(int, run.stdout.split())
    if not kind:
        largest //= 2  # a wide tensor is copied from its map, with 16 bits for each number
    assert 4 * largest < model
    assert peak < model + largest + SLACK, f"{peak / 1e6:.1f} MB for {model / 1e6:.1f} and {largest / 1e6:.1f}"
