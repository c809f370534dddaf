"""Choosing an implementation, and the messages about shapes."""

import logging
import types

import pytest

from kernels_pallas import dispatch
from kernels_pallas.shape_check import check_groups, check_shapes


def too_long(x):
    return f"{len(x)} is too long" if len(x) > 2 else None


FAST = dispatch.Implementation("fast", lambda x: ("fast", x), too_long)
SLOW = dispatch.Implementation("slow", lambda x: ("slow", x))


def test_a_named_choice_is_strict():
    assert dispatch.call("op", [FAST, SLOW], "slow", "ab") == ("slow", "ab")
    with pytest.raises(dispatch.UnsupportedError, match="op: fast cannot run this call: 3 is too long"):
        dispatch.call("op", [FAST, SLOW], "fast", "abc")
    with pytest.raises(dispatch.UnsupportedError, match="no implementation is called 'other'; there are: fast, slow"):
        dispatch.call("op", [FAST, SLOW], "other", "ab")


def test_the_automatic_choice_falls_back_and_reports_why(caplog):
    caplog.set_level(logging.INFO, "kernels_pallas")
    assert dispatch.call("op", [FAST, SLOW], None, "ab") == ("fast", "ab")
    assert not caplog.messages
    assert dispatch.call("op", [FAST, SLOW], None, "abc") == ("slow", "abc")
    assert caplog.messages == ["op runs by slow (not fast: 3 is too long)"]
    with pytest.raises(dispatch.UnsupportedError, match=r"can run this call \(not fast: 3 is too long"):
        dispatch.call("op", [FAST], None, "abc")


def array(*shape):
    return types.SimpleNamespace(shape=shape)


def test_shapes_are_bound_by_name():
    assert check_shapes("op", x=(array(2, 3), "rows width"), y=(array(2, 2), "rows width-1")) == {"rows": 2, "width": 3}
    for shape, message in [
        ((2, 3, 1), r"op: x has shape \(2, 3, 1\), expected \[rows, width\]"),
        ((4, 3), r"op: y has shape \(2, 2\), expected \[rows, width-1\] with rows = 4 \(by x\)"),
        ((2, 4), r"op: y has shape \(2, 2\), expected \[rows, width-1\] with width-1 = 3 \(by x\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_shapes("op", x=(array(*shape), "rows width"), y=(array(2, 2), "rows width-1"))


def test_heads_divide_into_groups():
    check_groups("op", 9, 3)
    for groups in (2, 0):
        with pytest.raises(ValueError, match="op: 9 heads do not divide into"):
            check_groups("op", 9, groups)
