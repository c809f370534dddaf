"""As much of a hub's HTTP interface as downloading a model needs, on loopback, over a folder of files."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"


class HubStandIn:
    """Serves folders by names such as `org/name`, in the revisions main and `COMMIT`. Gated ones ask for consent."""

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated = models, gated
        self.asked: list[str] = []
        """Files whose content was sent."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = unquote(urlsplit(request.path).path).strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        org, name, *rest = parts[2:] if listing else parts
        model, headers = f"{org}/{name}", {"X-Repo-Commit": COMMIT}
        if model not in self.models:
            self._send(request, 404, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        elif model in self.gated and not listing:
            self._send(request, 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif rest[1:2] and rest[1] not in ("main", COMMIT):
            self._send(request, 404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
        elif listing:
            self._send(request, 200, self._tree(model) if rest[0] == "tree" else self._info(model), headers)
        else:
            self._send_file(request, self.models[model] / "/".join(rest[2:]), headers)

    def _files(self, model: str) -> list[Path]:
        return sorted(path for path in self.models[model].rglob("*") if path.is_file())

    def _info(self, model: str) -> dict[str, object]:
        files = [{"rfilename": str(path.relative_to(self.models[model]))} for path in self._files(model)]
        return {"_id": "1", "id": model, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                "downloads": 0, "likes": 0, "tags": [], "siblings": files}  # fmt: skip

    def _tree(self, model: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": str(path.relative_to(self.models[model])), "size": path.stat().st_size,
             "oid": _digest(path)}
            for path in self._files(model)
        ]  # fmt: skip

    def _send_file(self, request: BaseHTTPRequestHandler, path: Path, headers: dict[str, str]) -> None:
        if not path.is_file():
            self._send(request, 404, {"error": "no"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        if request.command == "GET":
            self.asked.append(path.name)
        self._send(request, 200, content, headers | {"ETag": f'"{_digest(path)}"'})

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: object, headers: dict[str, str]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
