"""Following a grammar, drafts included, where it cannot be followed."""

import numpy as np
import pytest

from serving.engine.structured.grammars import Grammars, StructuredOutputs
from tests.support.models.letter_tokens import EOS, ID, TOO_BIG, WORDS, letters

ONE_WAY_IS_TOO_BIG = f'start: "x" ("y" "x" "y" "!" | "z" {TOO_BIG} "?")'


@pytest.fixture(scope="module")
def grammars():
    return Grammars(letters(), len(WORDS), (EOS,))


def allowed(mask: np.ndarray) -> set[str]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {word for i, word in enumerate(WORDS) if bits[i]}


def test_a_wrong_draft_leaves_no_trace(grammars):
    constraint = grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
    assert constraint.advance([ID["x"]]) == 1
    masks = constraint.masks([ID["z"], ID["ab"]], 3)
    assert allowed(masks[0]) == {"y", "z"}
    assert "a" in allowed(masks[1])
    assert constraint.error is None
    assert constraint.advance([ID["y"]]) == 1
    assert allowed(constraint.masks([], 3)[0]) == {"x"}
    assert constraint.advance([ID[c] for c in "xy!"]) == 3
    assert constraint.finished
    assert constraint.error is None


def test_a_right_draft_into_the_same_place_fails_as_without_drafts(grammars):
    for drafts in ([], [ID["z"], ID["ab"]]):
        constraint = grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
        constraint.advance([ID["x"]])
        constraint.masks(drafts, 3)
        assert constraint.advance([ID["z"], ID["ab"]]) == 1
        assert "items" in constraint.error


def test_an_end_where_the_grammar_wants_more_is_an_error(grammars):
    """A head behind a failed draft allows everything, the end too."""
    constraint = grammars.start(StructuredOutputs(grammar=ONE_WAY_IS_TOO_BIG))
    constraint.advance([ID["x"], EOS])
    assert "wants more" in constraint.error
    done = grammars.start(StructuredOutputs(grammar='start: "a" "b"*'))
    assert done.advance([ID["a"], EOS]) == 2
    assert done.error is None
