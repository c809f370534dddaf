"""A port of this process, for what is to be heard or said there."""

import contextlib
import socketserver
import threading


@contextlib.contextmanager
def listener(serve):
    """A port on which `serve(connection)` runs for each who comes."""
    open_ones = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            open_ones.append(self.request)
            with contextlib.suppress(OSError):
                serve(self.request)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        for each in (server.socket, *open_ones):
            each.close()
