"""What a trainer does over HTTP, with an operator's key only: pauses, sleep, new weights and profiles."""

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.tensors.tensor_set import TensorSet
from serving.api.http.endpoints.operation import Profiler
from serving.api.http.errors import ApiError
from serving.state_transfer.identity import model_digest
from tests.support.engines.versioned_engine import VersionedEngine
from tests.support.servers.live_server import completed, in_process

TRAINER, CLIENT = ({"authorization": f"Bearer {key}"} for key in ("trainer", "client"))


@pytest.fixture(scope="module")
def made():
    return VersionedEngine(seed=1)


@pytest.fixture(scope="module")
def client(made, tmp_path_factory):
    profiles = str(tmp_path_factory.mktemp("profiles"))
    with in_process(made.engine, admin_key="trainer", api_key="client", profile_dir=profiles) as client:
        yield client


@pytest.mark.full
def test_a_trainers_round(made, client, tmp_path):
    (choice,) = completed(client, headers=CLIENT)["choices"]
    assert choice["weights_versions"] == [["0", 4]]
    save_file({path: np.ascontiguousarray(v) for path, v in made.weights(1).items()}, tmp_path / "model.safetensors")
    state = client.post("/pause?mode=keep", headers=TRAINER).json()
    assert (state["paused"], state["held"]) == (True, "the engine is paused: call resume() first")
    state = client.post("/update_weights", json={"path": str(tmp_path), "version": "7"}, headers=TRAINER).json()
    assert (state["weights_version"], state["updates"]) == ("7", 1)
    assert client.post("/resume", headers=TRAINER).json()["held"] is None
    answer = completed(client, headers=CLIENT)
    assert answer["choices"][0]["weights_versions"] == [["7", 4]]
    assert answer["choices"][0]["token_ids"] != choice["token_ids"]
    assert completed(client, headers=CLIENT)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    assert client.post("/sleep?level=2", headers=TRAINER).json()["sleep_level"] == 2
    assert "no weights" in client.post("/wake_up", headers=TRAINER).json()["held"]
    client.post("/update_weights", json={"path": str(tmp_path)}, headers=TRAINER)
    assert client.get("/rollout_state", headers=TRAINER).json()["weights_version"] == "2"
    again = completed(client, headers=CLIENT)["choices"][0]
    assert (again["token_ids"], again["weights_versions"]) == (answer["choices"][0]["token_ids"], [["2", 4]])


def test_files_of_new_weights_are_read_while_others_are_served(client, monkeypatch):
    """They were once read on the engine's thread, which waited for their file system."""
    reading, gone = threading.Event(), threading.Event()

    def wait(*_, **__):
        reading.set()
        gone.wait(60)
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(TensorSet, "__init__", wait)
    with ThreadPoolExecutor(1) as threads:
        update = threads.submit(client.post, "/update_weights", json={"path": "x"}, headers=TRAINER)
        try:
            assert reading.wait(30)
            completed(client, headers=CLIENT)
            assert not update.done()
        finally:
            gone.set()
        assert update.result().status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/update_weights", {"path": "/nowhere"}, 400, "no \\*.safetensors"),
        ("/update_weights", {"path": "x", "weights": 3}, 400, "weights"),
        ("/sleep?level=3", None, 400, "level"),
        ("/pause?mode=now", None, 400, "mode"),
    ],
)
def test_what_cannot_be_done(client, path, body, status, message):
    answer = client.post(path, json=body, headers=TRAINER)
    assert answer.status_code == status
    assert re.search(message, answer.json()["error"]["message"])


def test_checksums_are_those_of_the_weights_in_memory(made, client, tmp_path):
    before = client.get("/weights/checksum", headers=TRAINER).json()
    assert before == client.get("/weights/checksum", headers=TRAINER).json()
    name, values = next(iter(before["weights"])), {path: np.array(v) for path, v in made.weights(2).items()}
    changed = {name: np.ascontiguousarray(values[name])}
    changed[name].reshape(-1)[3] += 1
    save_file(changed, tmp_path / "model.safetensors")
    client.post("/update_weights", json={"path": str(tmp_path), "partial": True}, headers=TRAINER)
    after = client.get("/weights/checksum", headers=TRAINER).json()
    assert after["checksum"] != before["checksum"]
    assert after["weights_version"] != before["weights_version"]
    assert {path for path, digest in after["weights"].items() if digest != before["weights"][path]} == {name}
    assert client.get("/weights/checksum", headers=CLIENT).status_code == 403
    weights, model = made.engine.control.weights, made.engine.control.weights._model
    assert after["checksum"] == model_digest(model, model.config) == weights.checksum().checksum


@pytest.mark.parametrize(
    "path",
    ["pause", "resume", "update_weights", "sleep", "wake_up", "reset_prefix_cache", "v1/load_lora_adapter",
     "start_profile"],
)  # fmt: skip
def test_operators_only(server, client, path):
    body = {"path": "x", "lora_name": "x", "lora_path": "x"}
    assert client.post(f"/{path}", json=body, headers=CLIENT).status_code == 403
    assert client.post(f"/{path}", json=body).status_code == 401
    assert server.http.post(f"/{path}", json=body).json()["error"]["code"] == "no_admin_key"


def test_a_profile(client):
    profiles = Path(client.app.state.context.settings.profile_dir)
    assert client.post("/stop_profile", headers=TRAINER).status_code == 409
    answer = client.post("/start_profile", headers=TRAINER)
    assert answer.json() == {"status": "profiling", "directory": str(profiles)}
    assert client.post("/start_profile", headers=TRAINER).status_code == 409
    assert client.post("/stop_profile", headers=TRAINER).status_code == 200
    assert list(profiles.rglob("*.xplane.pb"))


async def test_a_profile_ends_by_itself_and_needs_a_folder(tmp_path):
    profiler = Profiler(str(tmp_path), 0.05)
    await profiler.start()
    end = time.monotonic() + 60
    while time.monotonic() < end and not list(tmp_path.rglob("*.xplane.pb")):
        await asyncio.sleep(0.05)
    with pytest.raises(ApiError, match="no profile is running"):
        await profiler.stop()
    with pytest.raises(ApiError, match="no folder for profiles"):
        await Profiler(None, 1.0).start()
    assert list(tmp_path.rglob("*.xplane.pb"))


async def test_a_profile_that_cannot_be_written_is_kept(tmp_path):
    folder = tmp_path / "profiles"
    folder.write_text("a file")
    profiler = Profiler(str(folder), 60.0)
    await profiler.start()
    with jax.profiler.TraceAnnotation("marker"):
        pass
    for _ in range(2):
        with pytest.raises(ApiError, match=r"cannot be written to .*File exists") as error:
            await profiler.stop()
        assert error.value.status == 503
    assert profiler._folder is not None
    assert profiler._folder._finalizer.atexit, "one that is never written is removed when the process ends"
    folder.unlink()
    await profiler.stop()
    assert not Path(profiler._folder.name).exists()
    assert b"marker" in next(folder.rglob("*.xplane.pb")).read_bytes()


def test_cached_prefixes_are_dropped_on_request(client):
    completed(client, headers=CLIENT)
    assert completed(client, headers=CLIENT)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert client.post("/reset_prefix_cache", headers=TRAINER).json() == {"status": "ok"}
    assert completed(client, headers=CLIENT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_settings_are_told_to_operators_without_keys(client):
    assert client.get("/server_info", headers=CLIENT).status_code == 403
    answer = client.get("/server_info", headers=TRAINER)
    info = answer.json()
    assert info["server"]["served_model_name"] == ["tiny"]
    assert info["server"]["max_connections"] == 4096
    assert info["engine"]["max_model_len"] > 0
    assert info["hardware"]["platform"] == "cpu"
    assert not {"trainer", "client"} & set(re.findall(r"\w+", answer.text))


def test_probes_of_other_servers_need_no_key(client, monkeypatch):
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
    assert client.get("/tokenizer_info").status_code == 401
    codec = client.app.state.context.codec
    assert client.get("/tokenizer_info", headers=CLIENT).json()["vocab_size"] == codec.tokenizer.vocab_size
    monkeypatch.setattr(codec, "tokenizer", None)
    answer = client.get("/tokenizer_info", headers=CLIENT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_tokenizer")
