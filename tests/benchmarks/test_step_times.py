"""The table of step times in docs/hardware.md is what the script prints."""

from pathlib import Path

import pytest

from benchmarks import step_times

DOCUMENT = Path(__file__).parents[2] / "docs" / "hardware.md"


@pytest.mark.full
def test_the_documented_table_is_current(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["step_times"])
    assert step_times.main() == 0
    assert capsys.readouterr().out.strip() in DOCUMENT.read_text()


def test_a_mixed_step_is_compared_with_two_steps():
    decode, mixed = step_times.step_rows("mamba2-130m", "v6e-1", {"max_model_len": 2048})
    assert float(mixed[-2]) < float(mixed[-1])
    assert float(decode[-2]) < float(mixed[-1])
