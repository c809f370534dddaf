"""A port of this process, for what is to be heard or said there."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def listener(serve):
    """A port on which `serve(connection)` runs for each who comes."""
    server = socket.create_server(("127.0.0.1", 0))
    open_ones = []

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            open_ones.append(connection)
            threading.Thread(target=lambda c=connection: _quietly(serve, c), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        for each in (server, *open_ones):
            each.close()


def _quietly(serve, connection):
    with contextlib.suppress(OSError):
        serve(connection)
