"""Adapters over HTTP: a name in `model` uses one, operators load and remove them."""

import pytest

from checkpoints import load_config
from checkpoints.adapters.initial_state import write_initial_state
from serving import ConfigError, EngineConfig
from serving.api.http.settings import ServerSettings
from serving.engine.assembly.build import build_engine
from tests.support.models.golden_case import FIXTURES, Case
from tests.support.models.random_models import random_layers
from tests.support.servers.live_server import LiveServer

FIXTURE = "lfm2"
ADAPTER = str(FIXTURES / FIXTURE / "adapter")
FLAGS = {
    "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 128, "state_block_size": 32,
    "tile_size": 32, "page_size": 16, "warmup": False, "enable_lora": True, "max_loras": 1, "max_lora_rank": 4,
    "max_initial_states": 1,
}  # fmt: skip
ADMIN = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def server():
    built = build_engine(EngineConfig.create(model=str(FIXTURES / FIXTURE), **FLAGS), progress=False)
    made = LiveServer(built.engine, prepare=False, served_model_name="base", admin_key="operator")
    made.wait_until_ready()
    yield made
    made.close()


def logprobs(server, model):
    answer = server.complete(Case(FIXTURE).prompts[4].tolist(), model=model, max_tokens=4, logprobs=1)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


def post(server, path, **body):
    return server.http.post(path, json=body, headers=ADMIN)


def test_an_adapter_is_a_model_while_it_is_loaded(server):
    base = logprobs(server, "base")
    assert server.http.post("/v1/completions", json={"model": "tenant", "prompt": [1]}).status_code == 404
    assert post(server, "/v1/load_lora_adapter", lora_name="tenant", lora_path=ADAPTER).status_code == 200
    adapted = logprobs(server, "tenant")
    assert adapted != pytest.approx(base, abs=1e-3)
    assert logprobs(server, "base") == pytest.approx(base, abs=1e-4), "the base model's cached states are its own"
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert (cards["tenant"]["parent"], cards["tenant"]["root"]) == ("base", ADAPTER)
    assert cards["base"].get("parent") is None
    # With room for one adapter, another name takes its place; the first is loaded again when it is asked for.
    assert post(server, "/v1/load_lora_adapter", lora_name="other", lora_path=ADAPTER).status_code == 200
    assert logprobs(server, "tenant") == pytest.approx(adapted, abs=1e-4)
    # A loaded name is replaced on request only.
    for more, status in (({}, 400), ({"load_inplace": True}, 200)):
        body = {"lora_name": "other", "lora_path": ADAPTER} | more
        assert post(server, "/v1/load_lora_adapter", **body).status_code == status
    for name in ("tenant", "other"):
        assert post(server, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert server.http.post("/v1/completions", json={"model": "tenant", "prompt": [1]}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("load", {"lora_name": "base", "lora_path": ADAPTER}, 400, "name of the model"),
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "/nowhere"),
        ("load", {"lora_name": "", "lora_path": ADAPTER}, 400, "lora_name"),
        ("unload", {"lora_name": "x"}, 404, "not loaded"),
    ],
)
def test_refusals_are_clear(server, path, body, status, words):
    answer = post(server, f"/v1/{path}_lora_adapter", **body)
    assert answer.status_code == status
    assert words in answer.text


def test_a_learned_initial_state_is_a_model(server, tmp_path):
    config = load_config(FIXTURES / FIXTURE)
    write_initial_state(tmp_path, random_layers(config), config)
    assert post(server, "/v1/load_lora_adapter", lora_name="state", lora_path=str(tmp_path)).status_code == 200
    assert logprobs(server, "state") != pytest.approx(logprobs(server, "base"), abs=1e-3)
    assert post(server, "/v1/unload_lora_adapter", lora_name="state").status_code == 200


@pytest.mark.parametrize("module", ["tenant", "=path", "tenant=", "default=path"])
def test_modules_are_names_and_directories(module):
    with pytest.raises(ConfigError, match="lora_modules"):
        ServerSettings.create(lora_modules=(module,))
