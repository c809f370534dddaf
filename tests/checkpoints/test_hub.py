"""Models by their name on a hub (a stand-in on loopback): downloaded once, then taken from the cache, or refused.

In processes of their own: the library reads its variables when it is imported.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from checkpoints.resolve import DEMO_DIRECTORY, is_hub_name, local

ROOT = Path(__file__).resolve().parents[2]
NAME = "made-up/Demo-1.0"
PROGRAM = """
import json, sys
from checkpoints import CheckpointError
from checkpoints.resolve import local
told = []
for ref, options in json.loads(sys.argv[1]):
    try:
        told.append(local(ref, **options))
    except CheckpointError as error:
        told.append(f"error: {error}")
print(json.dumps(told))
"""


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "repository"
    shutil.copytree(DEMO_DIRECTORY, folder)
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"another form")
    (folder / "consolidated.safetensors").write_bytes(b"another form")
    (folder / "pytorch_model.bin").write_bytes(b"another form")
    stand_in = HubStandIn({NAME: folder, "made-up/gated": folder}, gated=("made-up/gated",))
    yield stand_in
    stand_in.close()


def python(hub, home, *words, **more):
    """What a process of Python with these variables prints."""
    variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), **more}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(hub, home, *calls, **more):
    """What `local` gives for each call, in a process with these variables."""
    return json.loads(python(hub, home, "-c", PROGRAM, json.dumps(calls), **more).splitlines()[-1])


def test_what_is_a_hubs_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert not is_hub_name(NAME)  # a folder of that name comes first
    for other in ("demo", "./made/up", "a/b/c", "/a/b", "nemotron-h-8b", "~/x", "a/", "../x"):
        assert not is_hub_name(other), other
        assert local(other) == other


def test_downloads_and_refusals(hub, tmp_path):
    home, elsewhere = tmp_path / "home", str(tmp_path / "elsewhere")
    first, again, by_commit, small, *refused = told(
        hub, home,
        [NAME, {}], [NAME, {}], [NAME, {"revision": COMMIT}], [NAME, {"weights": False, "download_dir": elsewhere}],
        ["made-up/none", {}], [NAME, {"revision": "v9"}], ["made-up/gated", {}],
    )  # fmt: skip
    folder = Path(first)
    assert folder.is_relative_to(home)
    assert (folder / "model.safetensors").read_bytes() == (DEMO_DIRECTORY / "model.safetensors").read_bytes()
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "pytorch_model.bin").exists()
    assert not any((folder / name).exists() for name in ("original", "consolidated.safetensors"))
    assert first == again == by_commit
    assert hub.asked.count("model.safetensors") == 1
    assert Path(small).is_relative_to(elsewhere)
    assert not Path(small, "model.safetensors").exists()
    for line, says in zip(refused, ("no such model", "no revision 'v9' of it", "asks for consent first"), strict=True):
        assert says in line
        assert line.startswith("error:")
        assert "\n" not in line
    before = len(hub.asked)
    kept, unknown = told(hub, home, [NAME, {}], ["made-up/other", {}], HF_HUB_OFFLINE="1")
    assert kept == first
    assert "not in the cache, and HF_HUB_OFFLINE is set" in unknown
    assert len(hub.asked) == before
    hub.close()
    kept, unknown = told(hub, home, [NAME, {}], ["made-up/other", {}])
    assert kept == first
    assert f"not in the cache, and {hub.url} cannot be reached" in unknown


@pytest.mark.full
def test_the_program(hub, tmp_path):
    """A prompt is continued by a model from the hub; a server would have the hub's name for it."""
    line = ["-m", "serving.cli", "generate", "Tom has", "--model", NAME, "--revision", "main"]
    few, home = ["--max-tokens", "4", "--max-model-len", "128"], tmp_path / "home"
    assert python(hub, home, *line, *few).startswith("Tom has")
    program = (
        "from serving.api.http.settings import resolve_settings\n"
        f"settings, config = resolve_settings({{'model': {NAME!r}}}, {{}})\n"
        "print(settings.served_model_name[0], config.model)"
    )
    name, folder = python(hub, home, "-c", program).split()
    assert name == NAME
    assert Path(folder, "config.json").is_file()


@pytest.mark.full
def test_looking_at_a_model_fetches_no_weights(hub, tmp_path):
    for line, says in (
        (["inspect", "--model", NAME, "--revision", "main"], "parameters"),
        (["plan", "--model", NAME, "--topology", "v5e-1", "--analysis"], "v5e-1"),
    ):
        assert says in python(hub, tmp_path / "home", "-m", "serving.cli", *line)
    assert "config.json" in hub.asked
    assert "model.safetensors" not in hub.asked


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
