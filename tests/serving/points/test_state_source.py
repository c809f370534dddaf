"""What threads post to the loop, and where the pages of arrived states go."""

import threading
from types import SimpleNamespace

import numpy as np

from serving.core import RemoteLoad, RemoteState
from serving.points import inbox
from serving.points.state_source import Arrival

PAGE = 4


def a_load(start=0, pages=()):
    request = SimpleNamespace(transfer=SimpleNamespace(load=None))
    return RemoteLoad(request, RemoteState(16), start, 5, pages)


def test_only_an_idle_loop_waits_and_only_for_what_is_awaited(monkeypatch):
    monkeypatch.setattr(inbox, "PATIENCE", 3600.0)
    calls, made = inbox.Inbox(), []
    calls.take_all(idle=True)
    calls.awaited = 2
    calls.take_all()
    thread = threading.Timer(0.01, calls.post, [lambda: made.append("first")])
    thread.start()
    calls.take_all(idle=True)
    assert made == ["first"], "after the first call, the loop does not wait for another"
    calls.post(lambda: made.append("second"))
    calls.take_all()
    assert made == ["first", "second"]
    thread.join()


def test_pages_that_others_share_are_not_written():
    load = a_load(start=2 * PAGE, pages=[7, 8])
    kv = np.zeros((1, 2 * PAGE, 1))
    arrival = Arrival(load, state={}, pieces=[(0, kv), (PAGE, kv), (3 * PAGE, kv)])
    calls, arrived = [], []
    programs = SimpleNamespace(
        write_state=lambda store, slot, state, position: calls.append((slot, position)),
        write_piece=lambda store, *, pages, piece: calls.append(pages),
    )
    scheduler = SimpleNamespace(arrived=arrived.append)
    loop = SimpleNamespace(replace_store=lambda change: change(None), scheduler=scheduler)
    arrival.write(loop, programs, PAGE)
    assert calls == [(5, 16), [0, 7], [8, 0]]
    assert arrived == [load]
