"""A port of this process, for what is to be heard or said there."""

import contextlib
import socketserver
import threading


@contextlib.contextmanager
def listener(serve):
    """A port on which `serve(connection)` runs for each who comes. It may end as connections do (`OSError`): other
    errors are raised when the context is left."""
    open_ones, errors = [], []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            open_ones.append(self.request)
            try:
                serve(self.request)
            except OSError:
                pass
            except Exception as error:
                errors.append(error)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        for each in (server.socket, *open_ones):
            each.close()
    if errors:
        raise ExceptionGroup("serve has failed", errors)
