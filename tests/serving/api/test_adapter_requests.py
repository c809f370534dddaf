"""Adapters over HTTP: a name in `model` uses one, operators load and remove them."""

import pytest

from serving import ConfigError, EngineConfig
from serving.api.http.settings import ServerSettings
from serving.engine.assembly.build import build_engine
from tests.support.models.golden_case import FIXTURES, Case
from tests.support.servers.live_server import completed, in_process

FIXTURE = "lfm2"
ADAPTER = str(FIXTURES / FIXTURE / "adapter")
FLAGS = {
    "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 128, "state_block_size": 32,
    "tile_size": 32, "page_size": 16, "warmup": False, "enable_lora": True, "max_loras": 1, "max_lora_rank": 4,
}  # fmt: skip
ADMIN = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def client():
    built = build_engine(EngineConfig.create(model=str(FIXTURES / FIXTURE), **FLAGS), progress=False)
    with in_process(built.engine, served_model_name="base", admin_key="operator") as client:
        yield client


def logprobs(client, model):
    answer = completed(client, Case(FIXTURE).prompts[4].tolist(), model=model, logprobs=1)
    assert answer["model"] == model
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def post(client, path, **body):
    return client.post(path, json=body, headers=ADMIN)


def test_an_adapter_is_a_model_while_it_is_loaded(client):
    base = logprobs(client, "base")
    assert client.post("/v1/completions", json={"model": "tenant", "prompt": [1]}).status_code == 404
    assert post(client, "/v1/load_lora_adapter", lora_name="tenant", lora_path=ADAPTER).status_code == 200
    adapted = logprobs(client, "tenant")
    assert adapted != pytest.approx(base, abs=1e-3)
    assert logprobs(client, "base") == pytest.approx(base, abs=1e-4), "the base model's cached states are its own"
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert (cards["tenant"]["parent"], cards["tenant"]["root"]) == ("base", ADAPTER)
    assert cards["base"].get("parent") is None
    # With room for one adapter, another name takes its place; the first is loaded again when it is asked for.
    assert post(client, "/v1/load_lora_adapter", lora_name="other", lora_path=ADAPTER).status_code == 200
    assert logprobs(client, "tenant") == pytest.approx(adapted, abs=1e-4)
    # A loaded name is replaced on request only.
    for more, status in (({}, 400), ({"load_inplace": True}, 200)):
        body = {"lora_name": "other", "lora_path": ADAPTER} | more
        assert post(client, "/v1/load_lora_adapter", **body).status_code == status
    for name in ("tenant", "other"):
        assert post(client, "/v1/unload_lora_adapter", lora_name=name).status_code == 200
    assert client.post("/v1/completions", json={"model": "tenant", "prompt": [1]}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("load", {"lora_name": "base", "lora_path": ADAPTER}, 400, "name of the model"),
        ("load", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "/nowhere"),
        ("load", {"lora_name": "", "lora_path": ADAPTER}, 400, "lora_name"),
        ("unload", {"lora_name": "x"}, 404, "not loaded"),
    ],
)
def test_refusals_are_clear(client, path, body, status, words):
    answer = post(client, f"/v1/{path}_lora_adapter", **body)
    assert answer.status_code == status
    assert words in answer.text


@pytest.mark.parametrize("module", ["tenant", "=path", "tenant=", "default=path"])
def test_modules_are_names_and_directories(module):
    with pytest.raises(ConfigError, match="lora_modules"):
        ServerSettings.create(lora_modules=(module,))
