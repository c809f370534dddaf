"""The queue of states that arrive, and where their pages go."""

import threading
from types import SimpleNamespace

import numpy as np

from serving.core import RemoteLoad, RemoteState
from serving.points import state_source
from serving.points.state_source import Arrival, Arrivals

PAGE = 4


def a_load(start=0, pages=()):
    request = SimpleNamespace(transfer=SimpleNamespace(load=None))
    return RemoteLoad(request, RemoteState(16), start, 5, pages)


def test_only_an_idle_loop_waits_and_only_for_what_is_under_way(monkeypatch):
    monkeypatch.setattr(state_source, "_PATIENCE", 3600.0)
    queue, first, second = Arrivals(), Arrival(a_load()), Arrival(a_load())
    idle, stepping = SimpleNamespace(in_flight=False), SimpleNamespace(in_flight=True)
    assert not list(queue.take(idle))
    queue.under_way = 2
    assert not list(queue.take(stepping))
    thread = threading.Timer(0.01, queue.put, [first])
    thread.start()
    assert list(queue.take(idle)) == [first], "after the first arrival, the loop does not wait for another"
    assert queue.under_way == 1
    queue.put(second)
    assert list(queue.take(stepping)) == [second]
    assert not list(queue.take(idle))
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
