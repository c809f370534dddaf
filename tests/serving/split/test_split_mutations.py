"""Faults of a split, planted on purpose: each is what some engine did, or what a rule here prevents. All are seen."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from serving.core.cache.row_state import StateAccess
from serving.core.planning import admission
from serving.core.requests.request import RemoteLoad
from serving.core.scheduler import Scheduler
from serving.engine.steps.row_values import StateError
from serving.split import decode_side, prefill_side, worker
from serving.split.wire import Manifest
from serving.state_transfer import programs
from serving.state_transfer.programs import Arrangement, Piece, PointPrograms
from tests.serving.split import test_equal, test_manifest, test_side_bounds, test_sides
from tests.serving.state_transfer import test_state_transfer
from tests.support.fleets import split_pair

TABLE = Path(__file__).parents[3] / "docs" / "mutations.md"


@dataclasses.dataclass
class Fault:
    """What is planted, which lines of the edge cases it stands for, and a test that must fail then."""

    text: str
    stands_for: str
    plant: Callable[[], contextlib.AbstractContextManager]
    seen_by: Callable
    arguments: tuple = ()
    traced: bool = False
    """It is in a compiled program: those have to be compiled anew."""

    @property
    def name(self) -> str:
        return self.seen_by.__name__


def patch(where, name, value):
    return lambda: mock.patch.object(where, name, value)


def around(where, name, change):
    """`change(original)` in the place of a function."""
    return lambda: mock.patch.object(where, name, change(getattr(where, name)))


def _slot_read(original):
    def hold(host, row):
        held = original(host, row)
        held.slots_of.release(held.slot)
        held.slot = held.slots_of.take()
        return held

    return hold


def _first_pages(original):
    def specs(*arguments, **more):
        found, cut = original(*arguments, **more)
        return found, [Piece(piece.start - cut[0].start, piece.tokens) for piece in cut]

    return specs


def _published_at_once(original):
    def reserve(host, request, match):
        reason = original(host, request, match)
        if reason is None and host.cache.index is not None and host.cache.pages is not None:
            host.cache.index.publish_pages(request.progress.content, request.transfer.load.position)
        return reason

    return reserve


def _one_page_too_far(original):
    def reserve(host, request, match):
        reason = original(host, request, match)
        load = request.transfer.load
        if reason is None and load.start and len(load.pages) > 1:
            load.start += host.config.page_size
            load.pages = load.pages[1:]
        return reason

    return reserve


def _fresh(original):
    def arrived(host, load):
        original(host, load)
        load.request.progress.state.advance_chunk(StateAccess(0, [0]), load.position)

    return arrived


def _without_hidden(original):
    def write_state(self, store, slot, state, position):
        return original(self, store, slot, state | {"hidden": np.zeros_like(state["hidden"])}, position)

    return write_state


def _no_draft_layers(original):
    def write(arrangement, store, piece, pages):
        layers = split_pair.CONFIG.num_attention_uses
        changed = original(arrangement, dataclasses.replace(store, kv=store.kv[:layers]), piece, pages)
        return dataclasses.replace(store, kv=(*changed.kv, *store.kv[layers:]))

    return write


def _by_bytes(self, array, stored):
    """As many numbers as there should be, from the front."""
    shape = (*stored.shape[: -len(array.shape)], *array.shape)
    return stored[tuple(slice(size) for size in shape)]


def _old_hold(original):
    def hold(host, row):
        held = original(host, row)
        host.release_hold(held)
        return held

    return hold


def _unneeded_by_pages(request, match):
    remote = request.transfer.remote
    return remote is not None and match is not None and match.matched >= remote.position // 8 * 8


def _all_where_none(original):
    return lambda start, end, unit: original(0 if start >= end else start, end, unit)


FAULTS = [
    Fault("`recompute-last` gets the state after all tokens: the last is absorbed twice", "A37 B11",
          patch(split_pair, "fed_tokens", lambda prompt, handoff: list(prompt)),
          test_equal.test_tokens_are_those_of_one_engine, ("all", "none")),
    Fault("the state after the last token comes without its hidden state", "A37",
          around(PointPrograms, "write_state", _without_hidden), test_equal.test_tokens_are_those_of_one_engine,
          ("all", "none")),
    Fault("pages that are here count as the whole prefix: no state is asked for", "A39",
          patch(admission, "remote_is_unneeded", _unneeded_by_pages),
          test_sides.test_pages_there_and_state_not),
    Fault("no page missing is taken for all pages missing", "A40",
          around(worker, "pieces", _all_where_none), test_sides.test_pages_there_and_state_not),
    Fault("the first pages are sent, not those that are missing", "A39 B20",
          around(prefill_side, "point_specs", _first_pages), test_sides.test_hits_of_a_shorter_prefix,
          ("decode", "full")),
    Fault("another slot travels than the one in which the prompt ended", "A41 B7 B20",
          around(Scheduler, "hold", _slot_read), test_sides.test_full_handoff_and_reuse),
    Fault("B and C are cut by bytes", "A42 B21",
          patch(Arrangement, "logical", _by_bytes), test_state_transfer.test_numbers_of_devices_may_differ, (2,)),
    Fault("heads that several devices keep are taken for different ones", "A42 B21",
          patch(Arrangement, "logical", _by_bytes),
          test_state_transfer.test_numbers_of_devices_may_differ, (4,)),
    Fault("a state that did not come is gone on from", "A43",
          patch(Scheduler, "lost", lambda self, load: self.arrived(load)),
          test_sides.test_what_does_not_arrive_is_computed_here, (test_sides.failing_fetch,)),
    Fault("pages can be found before they have arrived", "A43 B9 B12",
          around(admission, "reserve", _published_at_once),
          test_sides.test_what_does_not_arrive_is_computed_here, (test_sides.failing_fetch,)),
    Fault("half of a transfer is taken for all of it", "A43",
          patch(decode_side, "_verify", lambda *_: None), test_sides.test_what_does_not_arrive_is_computed_here,
          (test_sides.half,)),
    Fault("what arrives damaged is not noticed, though checksums are sent", "A43",
          patch(decode_side, "checksums", lambda arrays: mock.ANY),
          test_sides.test_what_does_not_arrive_is_computed_here, (test_sides.damaged,)),
    Fault("what lies behind the last token is sent along", "A44",
          around(PointPrograms, "read_piece", lambda read: lambda self, store, pages, _, layers: read(
              self, store, pages, 10**6, layers)),
          test_state_transfer.test_a_point_arrives_whole_and_nothing_else_changes, (4, 8)),
    Fault("the prefill side is not told that a state is not wanted", "A52",
          patch(Scheduler, "pop_unneeded_remotes", lambda self: []),
          test_sides.test_aborts_let_go_on_both_sides, ("queued",)),
    Fault("what comes late is written to slots and pages of another row", "A43 A52",
          patch(RemoteLoad, "valid", True), test_sides.test_what_comes_late_is_not_written),
    Fault("states of another dtype are taken as they are", "B22",
          lambda: mock.patch.object(Manifest, "converts_state", property(lambda self: True), create=True),
          test_manifest.test_what_may_not,
          ({"ssm_dtype": "bfloat16"}, "--ssm-dtype")),
    Fault("the state that has arrived is not read: the row starts afresh", "B23",
          around(Scheduler, "arrived", _fresh), test_sides.test_full_handoff_and_reuse),
    Fault("the draft layer's keys and values stay behind", "B24",
          around(programs, "_write_piece", _no_draft_layers),
          test_sides.test_drafts_after_a_split_are_as_good, (), True),
    Fault("between what is here and what is sent, a page is missing", "B26",
          around(admission, "reserve", _one_page_too_far),
          test_sides.test_hits_of_a_shorter_prefix, ("decode", "full")),
    Fault("what is held may be given to another before it is copied", "A52 issue: leases",
          around(Scheduler, "hold", _old_hold), test_sides.test_full_handoff_and_reuse),
    Fault("leases never run out", "A52 issue: leases",
          patch(prefill_side.PrefillSide, "sweep", lambda self: 0), test_side_bounds.test_leases_run_out),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=[f"S{i}" for i in range(1, len(FAULTS) + 1)])
def test_fault_is_seen(fault):
    """The same test passes without the fault: it is one of this folder's."""
    with fault.plant(), contextlib.ExitStack() as stack:
        if fault.traced:
            anew = PointPrograms(split_pair.points().arrangement)
            stack.enter_context(mock.patch.object(split_pair, "points", return_value=anew))
        with pytest.raises((AssertionError, IndexError, StateError, ValueError, pytest.fail.Exception)):
            fault.seen_by(*fault.arguments)


def test_the_table_has_them_all():
    row = r"^\| S(\d+) \| ([^|]+) \| ([^|]+) \| `test_\w+.py` `(\w+)` \|$"
    rows = re.findall(row, TABLE.read_text(), re.MULTILINE)
    assert [(int(number), text, lines, name) for number, text, lines, name in rows] == [
        (number, fault.text, fault.stands_for, fault.name) for number, fault in enumerate(FAULTS, 1)
    ]
