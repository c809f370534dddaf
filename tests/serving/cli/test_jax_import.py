"""The lines that a GPU plugin writes when its libraries are loaded do not reach stderr; everything else does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = """
import os
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
os.write(2, b"I0000 00:00:1795405984.437363   14806 cudart_stub.cc:31] Could not find cuda drivers on your machine\\n")
os.write(2, b"something else\\n")
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a driver nothing is dropped")
def test_only_the_plugins_lines_are_dropped(tmp_path):
    """A module in place of JAX writes to the file descriptor, as the libraries of the plugin do."""
    (tmp_path / "jax.py").write_text(PLUGIN)
    folder = tmp_path / "jax_plugins" / "xla_cuda12"
    folder.mkdir(parents=True)
    (folder / "plugin.so").write_text("not a library")
    script = (
        "import sys; from serving.cli.jax_import import import_jax; import_jax()\n"
        "sys.stderr.write('after\\n'); import os; os.write(2, b'end\\n')"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["something else", "after", "end"]
