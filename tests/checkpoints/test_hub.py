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
    options = {"capture_output": True, "text": True, "cwd": ROOT, "env": variables, "timeout": 300}
    done = subprocess.run([sys.executable, *words], **options)
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


COMMANDS = """
import json, sys
from serving.api.http.settings import resolve_settings
from serving.cli.main import run
name, *lines = json.loads(sys.argv[1])
for line in lines:
    assert run([*line, "--model", name]) == 0
    print("= end of a command =")
"""
SETTINGS = """
settings, config = resolve_settings({"model": name}, {})
print(settings.served_model_name[0], config.model)
"""


@pytest.mark.full
def test_commands(hub, tmp_path):
    """Looking at a model fetches no weights. A prompt is continued by it, and a server has the hub's name for it."""

    def said(program, *lines):
        return python(hub, tmp_path / "home", "-c", program, json.dumps([NAME, *lines])).split("= end of a command =")

    looks = ["inspect", "--revision", "main"], ["plan", "--topology", "v5e-1", "--analysis"]
    inspected, planned, _ = said(COMMANDS, *looks)
    assert "parameters" in inspected
    assert "v5e-1" in planned
    assert "config.json" in hub.asked
    assert "model.safetensors" not in hub.asked
    few = ["--max-tokens", "4", "--max-model-len", "128"]
    text, settings = said(COMMANDS + SETTINGS, ["generate", "Tom has", "--revision", "main", *few])
    assert text.startswith("Tom has")
    name, folder = settings.split()
    assert name == NAME
    assert Path(folder, "config.json").is_file()


COMMIT = "c0ffee" * 6 + "c0de"


class HubStandIn(ThreadingHTTPServer):
    """Serves folders by names such as `org/name`, in the revisions main and `COMMIT`. Gated ones ask for consent."""

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.models, self.gated = models, gated
        self.asked: list[str] = []
        """Files whose content was sent."""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class HubRequest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStandIn

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        org, name, *rest = parts[2:] if listing else parts
        model, hub = f"{org}/{name}", self.server
        if model not in hub.models:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif model in hub.gated and not listing:
            self._send(403, {"X-Error-Code": "GatedRepo"})
        elif rest[1:2] and rest[1] not in ("main", COMMIT):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        elif listing:
            tree = [
                {"type": "file", "path": str(path.relative_to(hub.models[model])), "size": path.stat().st_size,
                 "oid": _digest(path)}
                for path in sorted(hub.models[model].rglob("*")) if path.is_file()
            ]  # fmt: skip
            info = {"_id": "1", "id": model, "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                    "downloads": 0, "likes": 0, "tags": [],
                    "siblings": [{"rfilename": file["path"]} for file in tree]}  # fmt: skip
            self._send(200, {}, json.dumps(tree if rest[0] == "tree" else info).encode())
        elif not (path := hub.models[model] / "/".join(rest[2:])).is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound"})
        else:
            hub.asked += [path.name] * (self.command == "GET")
            self._send(200, {"ETag": f'"{_digest(path)}"'}, path.read_bytes())

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"{}") -> None:
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
