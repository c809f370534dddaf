"""The worker for Dynamo, with stand-ins for Dynamo's classes: what it asks a server, and what it answers."""

import argparse
import importlib
import json
import sys
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from unittest import mock

import httpx
import pytest

NAMES = {
    "dynamo.common.backend": ("EngineConfig", "LLMEngine", "LlmRegistration", "WorkerConfig"),
    "dynamo.common.backend.publisher": ("ZmqSource",),
    "dynamo.common.backend.run": ("run",),
    "dynamo.llm.exceptions": ("Disconnected", "InvalidArgument", "WorkerUnavailable"),
}
CONTEXT = SimpleNamespace(is_stopped=lambda: False)


@pytest.fixture
def worker(monkeypatch):
    for name, members in NAMES.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (Exception,), {}) if "exceptions" in name else type(member, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    constants = SimpleNamespace(DisaggregationMode=StrEnum("Mode", ["PREFILL", "DECODE"]))
    monkeypatch.setitem(sys.modules, "dynamo.common.constants", constants)
    monkeypatch.delitem(sys.modules, "serving.split.dynamo", raising=False)
    yield importlib.import_module("serving.split.dynamo")
    sys.modules.pop("serving.split.dynamo", None)


async def outputs(worker, mode, request, status, content):
    answer = mock.Mock(return_value=httpx.Response(status, content=content))
    engine = worker.ServerEngine(argparse.Namespace(url="http://s", api_key=None, disaggregation_mode=mode))
    engine._client = httpx.AsyncClient(base_url="http://s", transport=httpx.MockTransport(answer))
    found = [each async for each in engine.generate({"token_ids": [3, 4]} | request, CONTEXT)]
    return json.loads(answer.call_args_list[0].args[0].content), found


def stream(*events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


async def test_the_tokens_of_a_stream(worker):
    events = [
        {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]}}]},
        {"choices": [{"token_ids": [9], "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 2}},
    ]
    request = {
        "extra_args": {"nvext": {"cache_salt": "tenant"}},
        "sampling_options": {"temperature": 0, "guided_decoding": {"structural_tag": "{}"}},
        "prefill_result": {"disaggregated_params": {"ticket": 1}},
    }
    asked, found = await outputs(worker, "decode", request, 200, stream(*events))
    assert asked["prompt"] == [3, 4]
    assert asked["cache_salt"] == "tenant"
    assert asked["structured_outputs"] == {"structural_tag": "{}"}
    assert asked["kv_transfer_params"] == {"ticket": 1}
    assert [each["token_ids"] for each in found] == [[7, 8], [9]]
    assert found[0]["log_probs"] == [-1.0, -2.0]
    assert (found[1]["finish_reason"], found[1]["completion_usage"]) == ("stop", {"prompt_tokens": 2})


async def test_a_prefill_worker_passes_the_ticket_on(worker):
    answer = {"usage": {"prompt_tokens": 2}, "kv_transfer_params": {"ticket": 1}}
    asked, (found,) = await outputs(worker, "prefill", {}, 200, json.dumps(answer))
    assert asked["kv_transfer_params"] == {"do_remote_decode": True}
    assert found["disaggregated_params"] == {"ticket": 1}


@pytest.mark.parametrize(
    ("mode", "request_", "status", "content", "error"),
    [
        ("decode", {"sampling_options": {"n": 2}}, 200, "", "InvalidArgument"),
        ("decode", {}, 400, "wrong", "InvalidArgument"),
        ("decode", {}, 503, "full", "WorkerUnavailable"),
        ("decode", {}, 200, stream({"error": {"message": "failed"}}), "WorkerUnavailable"),
        ("decode", {}, 200, stream(), "Disconnected"),
        ("prefill", {}, 200, '{"usage": {}}', "WorkerUnavailable"),
    ],
)
async def test_errors_say_whether_another_worker_may_continue(worker, mode, request_, status, content, error):
    with pytest.raises(getattr(worker, error)):
        await outputs(worker, mode, request_, status, content)
