"""Planted faults of rows under a grammar that draft, and that sit out steps of their neighbors. See `faults`."""

from functools import partial

import numpy as np

from serving.core.requests.request import Request
from serving.engine.steps.row_values import RowInputs
from tests.serving.differential.faults import STRUCTURED, Patch
from tests.serving.differential.faults import fault as _fault

fault = partial(_fault, table=STRUCTURED)


@fault(53)
def no_sitting_out(patch: Patch) -> None:
    patch.setattr(Request, "sits_out", False)


@fault(54, RowInputs, "take_proposals")
def stale_proposals(sound, self, rows, lines):
    before = [(row.request.user, row.request.user.proposed) for row in rows]
    sound(self, rows, lines)
    for member, proposed in before:
        member.proposed = proposed or member.proposed


@fault(55, RowInputs, "take_proposals")
def proposals_of_a_neighbor(sound, self, rows, lines):
    if lines is not None and lines.proposed is not None:
        lines.proposed = np.roll(lines.proposed, 1, axis=0)
    sound(self, rows, lines)
