"""Requests with adapters through a router, a prefill worker and a decode worker, each a process."""

import json
import shutil

import httpx
import numpy as np
import pytest

from checkpoints import load_config
from checkpoints.adapters.adapter import CONFIG_FILE
from checkpoints.adapters.initial_state import initial_state_shapes, write_initial_state
from tests.support.fleets.processes import router, running, worker
from tests.support.models.golden_case import FIXTURES, Case

pytestmark = pytest.mark.full

FIXTURE = "nemotronh-moe"
ENGINE = {
    "model": str(FIXTURES / FIXTURE),
    "served_model_name": "base",
    "dtype": "float32",
    "max_model_len": 128,
    "max_loras": 4,
    "max_lora_rank": 4,
    "max_initial_states": 1,
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The directories of a LoRA adapter, of the same one with another scale, and of a learned initial state."""
    folder = tmp_path_factory.mktemp("adapters")
    lora = shutil.copytree(FIXTURES / FIXTURE / "adapter", folder / "lora")
    scaled = shutil.copytree(lora, folder / "scaled")
    config = json.loads((lora / CONFIG_FILE).read_text())
    (scaled / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 3 * config["lora_alpha"]}))
    model, rng = load_config(FIXTURES / FIXTURE), np.random.default_rng(0)
    layers = {
        index: {part: rng.normal(size=shape) for part, shape in parts.items()}
        for index, parts in initial_state_shapes(model).items()
    }
    write_initial_state(folder / "state", layers, model)
    return {"lora": lora, "scaled": scaled, "state": folder / "state"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, adapters):
    folder = tmp_path_factory.mktemp("fleet")

    def adapted(role, **names):
        modules = [f"--lora-modules={name}={adapters[kind]}" for name, kind in names.items()]
        return worker(role, folder, "--enable-lora", *modules, **ENGINE)

    prefill = adapted("prefill", tenant="lora", second="scaled", state="state", other="lora")
    decode = adapted("decode", tenant="lora", second="scaled", state="state", other="scaled", only_here="lora")
    with running(prefill, decode, router([prefill], [decode], folder)) as fleet:
        yield fleet


def answer(process, model, **more):
    body = {"model": model, "prompt": Case(FIXTURE).prompts[4].tolist(), "max_tokens": 6, "logprobs": 1}
    reply = httpx.post(f"{process.url}/v1/completions", json=body | {"temperature": 0} | more, timeout=240)
    assert reply.status_code == 200, reply.text
    logprobs = reply.json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def test_each_adapter_gives_the_outputs_of_one_server(fleet):
    """A worker without the adapter, or with other content under its name, costs time only and is not marked down."""
    prefill, decode, front = fleet
    outputs = {}
    for model, arrives in {
        "base": 1, "tenant": 1, "second": 1, "state": 1, "other": 0, "only_here": 0
    }.items():  # fmt: skip
        before = decode.get("/split/status")["arrived"]
        tokens, logprobs = outputs[model] = answer(front, model)
        assert decode.get("/split/status")["arrived"] == before + arrives, (model, front.log(), prefill.log())
        alone = answer(decode, model, cache_salt="alone")
        assert tokens == alone[0], model
        assert logprobs == pytest.approx(alone[1], abs=1e-4), model
    assert outputs["other"][1] == pytest.approx(outputs["second"][1], abs=1e-4)
    assert outputs["only_here"][1] == pytest.approx(outputs["tenant"][1], abs=1e-4)
    for one, other in (("base", "tenant"), ("tenant", "second"), ("base", "state")):
        assert outputs[one][1] != pytest.approx(outputs[other][1], abs=1e-3), (one, other)
    assert "adapter 'other' has other content on the prefill worker" in front.log()
    status = front.get("/status")
    assert all(each["up"] for role in ("prefill", "decode") for each in status[role])
    assert prefill.idle(), prefill.get("/split/status")
    assert decode.idle()
