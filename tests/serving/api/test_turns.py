"""Clients take turns on the event loop, by the time that their requests take there. Without real clocks."""

import asyncio
from contextvars import ContextVar

import pytest

from serving.api.http import limits as module
from serving.api.http.limits import Turns
from serving.api.http.text import TextCodec


class Simulated(asyncio.SelectorEventLoop):
    """An event loop on which only sleeping and `spend` take time."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.spent = 0.0, 0.0
        select = self._selector.select

        def skip(timeout: float | None = None) -> list:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip

    def time(self) -> float:
        return self.now

    async def spend(self, seconds: float) -> None:
        self.now, self.spent = self.now + seconds, self.spent + seconds


@pytest.fixture
def loop(monkeypatch):
    loop = Simulated()
    monkeypatch.setattr(module, "thread_time", lambda: loop.spent)
    yield loop
    loop.close()


async def begun(turns: Turns, others: tuple[str, ...], name: str | None, seconds: float, count: int) -> list[float]:
    """Returns when each of a client's requests began, which it sends all at once while others have one."""
    loop, begins, over = asyncio.get_running_loop(), [], asyncio.Event()

    async def work() -> None:
        begins.append(loop.time())
        await loop.spend(seconds)

    waiting = [asyncio.create_task(turns.run(other, over.wait)) for other in others]
    await asyncio.sleep(0.001)
    await asyncio.gather(*(turns.run(name, work) for _ in range(count)))
    over.set()
    await asyncio.gather(*waiting)
    return [each - 0.001 for each in begins]


@pytest.mark.parametrize(("name", "others", "wait"), [("a", ("b",), 4 / 2), ("a", (), 1), (None, ("b",), 1)])
def test_each_client_has_its_part_of_the_time(loop, name, others, wait):
    begins = loop.run_until_complete(begun(Turns(), others, name, 0.004, 21))
    # The time counts twice, for two clients, but half of it as that of the other, which has a request as well.
    assert begins[-1] == pytest.approx(20 * 0.004 * wait, rel=0.1)


def test_a_request_waits_for_a_bounded_time(loop):
    begins = loop.run_until_complete(begun(Turns(), ("b",), "a", 5.0, 3))
    assert begins == pytest.approx([0.0, 5.02, 10.04])


def test_a_cancelled_request_gives_its_turn_back(loop):
    async def run() -> None:
        turns, over = Turns(), asyncio.Event()
        stopped = [asyncio.create_task(turns.run(name, over.wait)) for name in ("a", "b", "b")]
        await asyncio.sleep(0)
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
        assert await begun(turns, (), "a", 5.0, 2) == pytest.approx([0.0, 5.0])  # alone: without a wait

    loop.run_until_complete(run())


async def test_texts_of_one_client_do_not_delay_those_of_another():
    """Threads take them in turn, also if one client has sent many before."""
    sender, done = ContextVar("sender"), []
    codec = TextCodec(None, 1 << 20, sender.get)

    async def read(client: str) -> None:
        sender.set(client)
        await codec.run(1 << 20, lambda: done.append(client))

    await asyncio.gather(*(asyncio.create_task(read(client)) for client in ["a"] * 40 + ["b"] * 2))
    codec.close()
    assert done.count("a") == 40
    assert "b" in done[:8], "two of the other client came before, and those that follow them at once"
