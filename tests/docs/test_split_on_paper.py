"""The tables of docs/split.md are what the arithmetic says, attention's quadratic part included."""

from pathlib import Path

import pytest

from benchmarks.split_on_paper import active_parameters, prefill_operations, table, times

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "split.md").read_text()


def test_the_page_has_the_tables():
    lines = PAGE.splitlines()
    for line in (*table(), *times()):
        if "---" not in line:
            assert line in lines


@pytest.mark.parametrize(("model", "more"), [("nemotron-h-8b", 0.27), ("falcon-h1-7b", 1.17), ("mamba2-2.7b", 0.0)])
def test_attention_is_quadratic(model, more):
    """Of 131,072 tokens: by how much it exceeds two operations a token for each weight."""
    tokens = 131_072
    assert prefill_operations(model, tokens) / (2 * active_parameters(model) * tokens) - 1 == pytest.approx(
        more, abs=0.01
    )
