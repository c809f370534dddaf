"""Instructions of the kernels at the sizes of Nemotron-H-8B, as the TPU's own compiler schedules them.

They are what makes a kernel bound by memory or not: `docs/hardware.md` compares them with the bytes.
"""

import pytest
from count_bundles import count_bundles

from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]
FASTER = [slow("v6e"), slow("tpu7x")]


@pytest.mark.parametrize("slice_name", ["v5e", *FASTER])
def test_state_update(slice_name):
    assert count_bundles("state_update", slice_name, rows=64) <= 1150


@pytest.mark.slow
@pytest.mark.parametrize(("slice_name", "most"), [("v5e", 1450), ("v6e", 1300), ("tpu7x", 1300)])
def test_state_update_with_drafts(slice_name, most):
    assert count_bundles("state_update", slice_name, rows=64, steps=4) <= most


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v5e", *FASTER])
def test_ssd_scan(slice_name):
    assert count_bundles("ssd_scan", slice_name, rows=16) <= 4300


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v5e", *FASTER])
def test_gated_scan(slice_name):
    assert count_bundles("gated_scan", slice_name, rows=18) <= 7700


@pytest.mark.parametrize("slice_name", ["v5e", *FASTER[:1]])
def test_delta_replay(slice_name):
    assert count_bundles("delta_replay", slice_name, rows=64, steps=4) <= 3100


@pytest.mark.parametrize("slice_name", ["v5e", *FASTER[:1]])
def test_delta_scan(slice_name):
    assert count_bundles("delta_scan", slice_name, rows=16) <= 10_000


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v5e", *FASTER])
def test_selective_update(slice_name):
    assert count_bundles("selective_update", slice_name, rows=64) <= 1050


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v5e", *FASTER])
def test_selective_scan(slice_name):
    """The loop over tokens counts once: its body is 8 tokens of 512 channels, for each 512 of a block's 2,048."""
    assert count_bundles("selective_scan", slice_name, rows=16) <= 2300
