"""Random traffic through schedule-invariant members of several devices: no bit depends on the schedule."""

import pytest

from kernels_pallas.native import WHY_MISSING
from tests.serving.differential.traces import run_traces
from tests.support.engines.shared_engines import MEMBERS
from tests.support.selection import slow


@pytest.mark.full
@pytest.mark.fuzz
@pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")
@pytest.mark.parametrize(
    ("how", "reached"),
    [("split", ("arrived",)), slow("adapters", ("lora", "state")), slow("drafts", ("layer", "accepted right"))],
)
def test_bits(how: str, reached: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the traces of members alone (`test_traces`) do not have."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 9)
    met = run_traces(50_000_000, 5, reached=("cached_tokens", *reached), ties=0, model=MEMBERS, **{how: True})
    assert not met["cut"]
