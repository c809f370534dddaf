"""A worker that stops at a chosen moment, so that it can be killed there, or sends a state as no worker should.

Run it as `python -m tests.support.servers.stoppable_worker FOLDER serve ...`.

A stage is armed by a file in FOLDER. The worker that gets there renames it, and waits until it is told to go on. Three
more are faults of sending a state over TCP, each for one state: `drip` sends a byte a second, `hole` nothing, `flip`
something else.
"""

import functools
import sys
import time
from pathlib import Path
from unittest import mock

from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import PrefillSide
from serving.split.transports import JaxTransport, TcpTransport
from tests.support.waiting import comes_true


class Stages:
    """The folder, as the worker and as the test see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arm(self, stage: str) -> None:
        """The next time that a worker gets there, it stops."""
        (self.folder / f"{stage}.armed").touch()

    def reached(self, stage: str, seconds: float = 60.0) -> bool:
        """Whether it has come to that."""
        return comes_true((self.folder / f"{stage}.reached").exists, seconds, 0.02)

    def go(self, stage: str) -> None:
        """Let a worker that waits at this stage continue; the stage can be armed again."""
        (self.folder / f"{stage}.reached").unlink()

    def at(self, stage: str) -> bool:
        """In the worker: whether to stop here."""
        try:
            (self.folder / f"{stage}.armed").rename(self.folder / f"{stage}.reached")
        except FileNotFoundError:
            return False
        return True

    def stop(self, stage: str) -> None:
        """In the worker: stop here, if asked to."""
        if self.at(stage):
            while (self.folder / f"{stage}.reached").exists():
                time.sleep(0.02)


_LONG = 60.0


class Meddled:
    """A connection that sends something long as it should not, or half of it, and stops."""

    def __init__(self, connection, stages: Stages) -> None:
        self._connection, self._stages = connection, stages

    def __getattr__(self, name: str):
        return getattr(self._connection, name)

    def sendall(self, data) -> None:
        if len(data) <= 1000:
            self._connection.sendall(data)
            return
        if self._stages.at("hole"):
            time.sleep(_LONG)
        if self._stages.at("drip"):
            for at in range(int(_LONG)):
                self._connection.sendall(data[at : at + 1])
                time.sleep(1.0)
        if self._stages.at("flip"):
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        half = len(data) // 2
        self._connection.sendall(data[:half])
        self._stages.stop("send")
        self._connection.sendall(data[half:])


def plant(stages: Stages) -> None:
    """Put the stages into the classes of this process."""

    def before(where, name: str, stage: str, when=lambda *_: True) -> None:
        original = getattr(where, name)

        @functools.wraps(original)
        def stopping(*arguments, **named):
            if when(*arguments):
                stages.stop(stage)
            return original(*arguments, **named)

        mock.patch.object(where, name, stopping).start()

    def exports(_, loop, plan) -> bool:
        return any(row.request.transfer.export is not None for row in plan.rows)

    def decodes(_, loop, plan) -> bool:
        return any(len(row.request.output_token_ids) >= 4 for row in plan.rows)

    def serves_halves(self, connection, serve=TcpTransport._serve) -> None:
        serve(self, Meddled(connection, stages))

    def offers(self, key, arrays, offer=JaxTransport.offer) -> None:
        # What was promised is never sent: a puller waits in the middle of its pull.
        if not stages.at("send"):
            offer(self, key, arrays)

    before(PrefillSide, "dispatched", "prefill", exports)
    before(DecodeSide, "_ask", "ask")
    before(JaxTransport, "fetch", "pull")
    before(TcpTransport, "fetch", "pull")
    before(DecodeSide, "dispatched", "decode", decodes)
    mock.patch.object(TcpTransport, "_serve", serves_halves).start()
    mock.patch.object(JaxTransport, "offer", offers).start()


if __name__ == "__main__":
    from serving.cli.main import main

    plant(Stages(Path(sys.argv.pop(1))))
    main()
