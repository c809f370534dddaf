"""Memory that loading a checkpoint takes."""

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.random import write_random
from tests.support.models.tiny_configs import CHECKPOINT


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
def test_peak_memory_is_the_model_and_one_tensor(tmp_path):
    """Read in a process of its own, whose high-water mark is set back just before."""
    hidden, vocab = 512, 24_000
    write_random(
        tmp_path, CHECKPOINT | {"hidden_size": hidden, "vocab_size": vocab, "n_routed_experts": 64}, dtype="bfloat16"
    )
    code = """
import sys, jax, checkpoints
from pathlib import Path
def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) * 1024
checkpoints.load_model("demo", progress=False)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = checkpoints.load_model(sys.argv[1], progress=False)
print(model.num_parameters * 4, status("VmHWM") - before)
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    model_bytes, peak = map(int, run.stdout.split())
    largest = hidden * vocab * 2  # as stored
    assert model_bytes > 4 * largest
    assert peak < model_bytes + largest + 10e6
