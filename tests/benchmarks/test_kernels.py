"""`python -m benchmarks.kernels` times operations, and says on what."""

import json

import pytest

from benchmarks.kernels.__main__ import main


def test_an_unknown_operation_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--operations", "scan"])
    assert "known are recurrence_scan" in capsys.readouterr().err


@pytest.mark.full
def test_kernels_are_timed(capsys, tmp_path):
    plot = tmp_path / "plot.png"
    words = ["--small", "--reps", "1", "--seconds", "0.001", "--shapes", "nemotron-h-8b", "--plot", str(plot)]
    assert main(words) == 0
    machine, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert machine["metric"] == "environment"
    timed = {line["metric"] for line in lines if line.get("v", 0) > 0}
    # The other operations have no shape of this name.
    recurrent = {"gated_scan", "gated_update", "gated_replay"} | {
        f"recurrence_{form}" for form in ("scan", "update", "replay")
    }
    assert timed == recurrent | {"causal_conv1d_update", "paged_attention", "gated_rms_norm", "linear"}
    assert all(line["implementation"].startswith(("xla", "native", "invariant")) for line in lines)
    assert plot.stat().st_size > 0
