"""Instructions of the kernels at the sizes of Nemotron-H-8B, as the TPU's own compiler schedules them.

They are what makes a kernel bound by memory or not: `docs/compiler-measurements.md` compares them with the bytes.
"""

import pytest
from count_bundles import count_bundles

from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

# The loop over tokens of `selective_scan` counts once: its body is 8 tokens of 512 channels, for each 512 of a block's
# 2,048.
MOST = [
    ("recurrence_update", {"rows": 64}, {"v5e": 1150, "v6e": 1150, "tpu7x": 1150}),
    ("recurrence_update", {"rows": 64, "steps": 4}, {"v5e": 1450, "v6e": 1300, "tpu7x": 1300}),
    ("recurrence_scan", {"tiles": 16}, {"v5e": 4300, "v6e": 4300, "tpu7x": 4300}),
    ("gated_scan", {"tiles": 18}, {"v5e": 7700, "v6e": 7700, "tpu7x": 7700}),
    ("recurrence_replay", {"erase": 1, "rows": 64, "steps": 4}, {"v5e": 3100, "v6e": 3100}),
    ("recurrence_scan", {"erase": 1, "tiles": 16}, {"v5e": 10_000, "v6e": 10_000}),
    ("selective_update", {"rows": 64, "steps": 1}, {"v5e": 1050, "v6e": 1050, "tpu7x": 1050}),
    ("selective_scan", {"tiles": 16}, {"v5e": 2300, "v6e": 2300, "tpu7x": 2300}),
]
BY_DEFAULT = [(MOST[n][0], MOST[n][1], "v5e", MOST[n][2]["v5e"]) for n in (0, 4)]
OTHERS = [(kernel, sizes, chip, most) for kernel, sizes, of in MOST for chip, most in of.items()]


@pytest.mark.parametrize(
    ("kernel", "sizes", "chip", "most"), [*BY_DEFAULT, *(slow(*each) for each in OTHERS if each not in BY_DEFAULT)]
)
def test_bundles(kernel, sizes, chip, most):
    assert count_bundles(kernel, chip, **sizes) <= most
