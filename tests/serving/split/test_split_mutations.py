"""Faults of a split, planted on purpose: each is what some engine did, or what a rule here prevents. All are seen."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from serving.core.cache.row_state import StateAccess
from serving.core.planning import admission
from serving.core.requests.request import RemoteLoad
from serving.core.scheduler import Scheduler
from serving.engine.steps.results import StateError
from serving.split import decode_side, prefill_side, worker
from serving.split.wire import Manifest
from serving.state_transfer import programs
from serving.state_transfer.programs import Arrangement, Piece, PointPrograms
from tests.serving.core.mutations.registry import Fault, Patch, mutation
from tests.serving.split import test_equal, test_manifest, test_side_bounds, test_sides
from tests.serving.state_transfer import test_state_transfer
from tests.support.fleets import split_pair

FILES = (test_equal, test_manifest, test_side_bounds, test_sides, test_state_transfer)
TESTS = {module.__name__.rpartition(".")[2]: module for module in FILES}
FAULTS: dict[int, Fault] = {}
ARGUMENTS: dict[str, tuple[Any, ...]] = {}
"""Of the test that docs/mutations.md names for a fault."""


def fault(number: int, *where: Any, seen_with: tuple[Any, ...] = (), compiles: str | None = None):
    """Register a fault, as `mutation` does. `seen_with`: arguments of the test that detects it."""
    ARGUMENTS[f"S{number}"] = seen_with
    return mutation(number, *where, table=FAULTS, kind="S", compiles=compiles)


def replaced(where: Any, name: str, value: object) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.setattr(where, name, value, raising=False)

    plant.__name__ = name
    return plant


fault(1, split_pair, "fed_tokens", seen_with=("all", "none"))(lambda whole, prompt, handoff: list(prompt))
fault(4, worker, "pieces")(lambda whole, start, end, unit: whole(0 if start >= end else start, end, unit))
fault(9, Scheduler, "lost", seen_with=(test_sides.failing_fetch,))(lambda whole, self, load: self.arrived(load))
fault(13, PointPrograms, "read_piece", seen_with=(4, 8))(
    lambda whole, self, store, pages, count, layers: whole(self, store, pages, 10**6, layers)
)


@fault(2, PointPrograms, "write_state", seen_with=("all", "none"))
def without_hidden(whole, self, store, slot, state, position):
    return whole(self, store, slot, state | {"hidden": np.zeros_like(state["hidden"])}, position)


@fault(3, admission, "remote_is_unneeded")
def unneeded_by_pages(whole, request, match):
    remote = request.transfer.remote
    return remote is not None and match is not None and match.matched >= remote.position // 8 * 8


@fault(5, prefill_side, "point_specs", seen_with=("decode", "full"))
def first_pages(whole, *arguments, **more):
    found, cut = whole(*arguments, **more)
    return found, [Piece(piece.start - cut[0].start, piece.tokens) for piece in cut]


@fault(6, Scheduler, "hold", seen_with=("decode", "full"))
def another_slot(whole, host, row):
    held = whole(host, row)
    held.slots_of.release(held.slot)
    held.slot = held.slots_of.take()
    return held


@fault(7, Arrangement, "logical", seen_with=(1, 2))
@fault(8, Arrangement, "logical", seen_with=(1, 4))
def by_bytes(whole, self, array, stored):
    """As many numbers as there should be, from the front."""
    shape = (*stored.shape[: -len(array.shape)], *array.shape)
    return stored[tuple(slice(size) for size in shape)]


@fault(10, admission, "reserve", seen_with=(test_sides.failing_fetch,))
def published_at_once(whole, host, request, match):
    reason = whole(host, request, match)
    if reason is None and host.cache.index is not None and host.cache.pages:
        host.cache.index.publish_pages(request.progress.content, request.transfer.load.position)
    return reason


fault(11, seen_with=(test_sides.half,))(replaced(decode_side, "_verify", lambda *_: None))
fault(12, seen_with=(test_sides.damaged,))(replaced(decode_side, "checksums", lambda arrays: mock.ANY))
fault(14, seen_with=("queued",))(replaced(Scheduler, "pop_unneeded_remotes", lambda self: []))
fault(15)(replaced(RemoteLoad, "valid", True))
fault(16, seen_with=({"ssm_dtype": "bfloat16"}, "--ssm-dtype"))(
    replaced(Manifest, "converts_state", property(lambda self: True))
)


@fault(17, Scheduler, "arrived", seen_with=("decode", "full"))
def starts_afresh(whole, host, load):
    whole(host, load)
    load.request.progress.state.advance_chunk(StateAccess(0, [0]))


@fault(18, programs, "_write_piece", seen_with=("mtp",), compiles="points")
def no_draft_layers(whole, arrangement, store, piece, pages):
    layers = split_pair.CONFIG.num_attention_uses
    changed = whole(arrangement, dataclasses.replace(store, kv=store.kv[:layers]), piece, pages)
    return dataclasses.replace(store, kv=(*changed.kv, *store.kv[layers:]))


@fault(19, admission, "reserve", seen_with=("decode", "full"))
def one_page_too_far(whole, host, request, match):
    reason = whole(host, request, match)
    load = request.transfer.load
    if reason is None and load.start and len(load.pages) > 1:
        load.start += host.config.page_size
        load.pages = load.pages[1:]
    return reason


@fault(20, Scheduler, "hold", seen_with=("decode", "full"))
def released_before_the_copy(whole, host, row):
    held = whole(host, row)
    host.release_hold(held)
    return held


fault(21)(replaced(prefill_side.PrefillSide, "sweep", lambda self: 0))


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS.values(), ids=str)
def test_fault_is_seen(fault: Fault, monkeypatch: Patch) -> None:
    """The same test passes without the fault: it is one of this folder's."""
    assert fault.seen_by is not None
    module, name = fault.seen_by
    fault.plant(monkeypatch)
    if fault.compiles:
        anew = PointPrograms(split_pair.points().arrangement)
        monkeypatch.setattr(split_pair, "points", lambda: anew)
    with pytest.raises((AssertionError, IndexError, StateError, ValueError, pytest.fail.Exception)):
        getattr(TESTS[module], name)(*ARGUMENTS[fault.name])
