"""Routers of other projects, as programs, in front of servers of the demo model (docs/fleets.md; extra `interop`)."""

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import load_config
from checkpoints.adapters.initial_state import write_initial_state
from tests.support.fleets.processes import free_port, running, worker
from tests.support.fleets.split_faults import AUTH, SECRET, Outcomes
from tests.support.models.random_models import random_layers

PYTHON = Path(os.environ.get("MAMBA_JAX_INTEROP", sys.executable))
"""Of the environment with the routers. The servers' environment needs the extra `events`."""
if not PYTHON.with_name("vllm-router").exists() or importlib.util.find_spec("zmq") is None:
    pytest.skip("needs the extra interop", allow_module_level=True)

pytestmark = pytest.mark.full
ROOT, B = Path(__file__).parents[3], 16
DEMO = ROOT / "checkpoints" / "demo"
ENGINE = {"state_block_size": B, "num_slots": 64, "num_pages": 320}
PROMPTS = [[random.Random(n).randrange(5, 200) for _ in range(40 + 8 * n)] for n in range(12)]
ADMIN = {"Authorization": "Bearer operator"}


class Front:
    """A router's processes. `name`: whose; `workers`: servers, by role."""

    def __init__(self, name: str, folder: Path, workers: dict[str, list]) -> None:
        self.name, self.folder, self.port, self.processes = name, folder, free_port(), []
        self.url = f"http://127.0.0.1:{self.port}"
        self.dynamo(workers) if name == "dynamo" else self.vllm(workers)
        end = time.monotonic() + 90
        while True:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                ask(self.url, PROMPTS[0])
                break
            assert time.monotonic() < end, [log.read_text()[-1500:] for log in folder.glob(f"{name}-*.log")]
            time.sleep(0.5)

    def start(self, *command: object, **environment: str) -> None:
        with (self.folder / f"{self.name}-{self.port}-{len(self.processes)}.log").open("w") as log:
            given = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)} | environment}
            started = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT, **given)
        self.processes.append((started, command, environment))

    def start_again(self) -> None:
        """Starts processes that have ended with their server."""
        for started, command, environment in self.processes[:]:
            if started.poll() is not None:
                self.start(*command, **environment)

    def vllm(self, workers: dict[str, list]) -> None:
        command = ["--port", self.port, "--prometheus-port", free_port(), "--health-check-interval-secs", 1]
        if "prefill" in workers:
            command += ["--vllm-pd-disaggregation", "--policy", "round_robin"]
            command += [part for role in workers for each in workers[role] for part in (f"--{role}", each.url)]
        else:
            command += ["--policy", "kv_aware", "--kv-event-model", "demo", "--kv-event-block-size", B]
            command += ["--worker-urls", *(each.url for each in workers["agg"])]
            for each in workers["agg"]:
                command += ["--kv-event-source", f"{each.url}={each.config['endpoint']}"]
                command += ["--kv-event-replay-source", f"{each.url}={each.config['replay_endpoint']}"]
        self.start(PYTHON.with_name("vllm-router"), *command)

    def dynamo(self, workers: dict[str, list]) -> None:
        files = {"DYN_FILE_KV": str(self.folder / f"found-{self.port}"), "DYN_EVENT_PLANE": "zmq"}
        common = ("--discovery-backend", "file")
        names = ["demo", "tuned"] if "agg" in workers else ["demo"]
        started = [(role, each, name) for role, those in workers.items() for each in those for name in names]
        for role, each, name in started:
            command = ["--url", each.url, "--model", DEMO, "--served-model-name", name, "--namespace", name]
            command += ["--kv-events", each.config["endpoint"]] if role == "agg" else ["--disaggregation-mode", role]
            self.start(PYTHON, "-m", "serving.split.dynamo", *command, "--block-size", B, *common, **files)
        command = ["--router-mode", "kv", "--kv-cache-block-size", B, "--migration-limit", 3]
        self.start(PYTHON, "-m", "dynamo.frontend", "--http-port", self.port, *command, *common, **files)

    def close(self) -> None:
        for started, *_ in self.processes:
            started.kill()
            started.wait(10)


def ask(url: str, prompt: list[int], **more) -> tuple[str, int]:
    """A greedy completion, and how many tokens came from the cache."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
    found = answer.json()
    return found["choices"][0]["text"], (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def serve(folder: Path, old=None):
    """A server, or one that takes another's place."""
    config = {"enable_kv_cache_events": True}
    for name in ("endpoint", "replay_endpoint"):
        config[name] = f"tcp://127.0.0.1:{free_port()}" if old is None else old.config[name]
    adapter = ("--enable-lora", f"--lora-modules=tuned={folder / 'tuned'}", "--max-initial-states=1")
    more = (f"--kv-events-config={json.dumps(config)}", "--admin-key=operator", *adapter)
    server = worker("", folder, *more, port=None if old is None else old.port, **ENGINE)
    server.config = config
    return server


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for logs, and for a learned initial state, which is an adapter."""
    folder, config = tmp_path_factory.mktemp("interop"), load_config(DEMO)
    write_initial_state(folder / "tuned", random_layers(config), config)
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    servers = [serve(folder) for _ in range(2)]
    with running(*servers):
        yield servers
        for each in servers:
            each.close()


@pytest.fixture(scope="module", params=["vllm-router", "dynamo"])
def front(request, folder, servers):
    with contextlib.closing(Front(request.param, folder, {"agg": servers})) as front:
        yield front


@pytest.fixture(scope="module")
def alone(servers):
    return [ask(servers[0].url, prompt, cache_salt="alone")[0] for prompt in PROMPTS]


def traffic(front, expected, count: int, **more) -> Outcomes:
    def one(number: int) -> tuple[str, str]:
        return ask(front.url, PROMPTS[number % len(PROMPTS)], **more)[0], expected[number % len(PROMPTS)]

    outcomes = Outcomes().of(count, 6, one, errors=(httpx.HTTPError, AssertionError))
    print(front.name, outcomes.line, outcomes.errors[:2])
    return outcomes


def test_the_deeper_state_wins(front, servers):
    """One server has computed 192 tokens of each prompt, and has lost that state: it has 64; the other one has 128."""
    rng, found = random.Random(front.name), []

    def prompts(count, tokens):
        return [[rng.randrange(5, 200) for _ in range(tokens)] for _ in range(count)]

    for turn in range(10):
        some, (keys, states) = prompts(20, 192), servers if turn % 2 else servers[::-1]
        with ThreadPoolExecutor(4) as pool:
            for server, those in (
                (keys, some), (keys, prompts(32, 200)), (keys, [each[:64] for each in some]),
                (states, [each[:128] for each in some]),
            ):  # fmt: skip
                list(pool.map(lambda each, url=server.url: ask(url, each, max_tokens=1), those))
        time.sleep(0.5)
        found += [ask(front.url, [*each, 5, 6, 7], max_tokens=1)[1] for each in some]
    assert found == [128] * 200


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_faults(front, servers, alone, folder, fault):
    """Of a server under load. After a restart the router no longer counts on what the server had."""
    broken, other, prompt = *servers, [*range(5, 197)]
    ask(broken.url, prompt)
    ask(other.url, prompt[:64])
    stop = threading.Timer(0.5, broken.process.send_signal, [signal.SIGSTOP if fault == "frozen" else signal.SIGKILL])
    go = threading.Timer(6, broken.process.send_signal, [signal.SIGCONT])
    stop.start()
    go.start()
    outcomes = traffic(front, alone, 60)
    go.join()
    if fault == "killed":
        servers[0] = serve(folder, broken)
        servers[0].wait_until_ready()
        front.start_again()
        time.sleep(8)  # empty batches are sent every five seconds
        assert ask(front.url, prompt)[1] == 64
    assert (outcomes.wrong, outcomes.errors) == ([], [])
    assert traffic(front, alone, 24) == Outcomes(right=24)


def test_adapters_and_salts(front, servers):
    def salted(salt):
        return {"nvext": {"cache_salt": salt}} if front.name == "dynamo" else {"cache_salt": salt}

    for more in ({"model": "tuned"}, {"model": "demo"} | salted("one")):
        direct = {"model": more["model"], "cache_salt": "alone"}
        expected = [ask(servers[1].url, prompt, **direct)[0] for prompt in PROMPTS]
        assert traffic(front, expected, 24, **more) == Outcomes(right=24), more
    prompt = [*range(7, 107)]
    cached = [ask(front.url, prompt, **salted(salt))[1] for salt in "abababab"]
    assert cached[:2] == [0, 0]
    assert max(cached) >= 96


def test_new_weights(front, servers, folder, alone):
    tensors = load_file(DEMO / "model.safetensors")
    name = next(name for name in tensors if "embed" in name)
    (folder / "changed").mkdir(exist_ok=True)
    save_file({name: np.roll(tensors[name], 1, axis=0)}, folder / "changed" / "model.safetensors")
    prompt = [*range(9, 109)]
    for path in (folder / "changed", DEMO):
        ask(front.url, prompt)
        for each in servers:
            body = {"path": str(path), "partial": path != DEMO}
            httpx.post(f"{each.url}/update_weights", json=body, headers=ADMIN, timeout=60).raise_for_status()
        time.sleep(0.5)
        expected = [ask(servers[1].url, each, cache_salt=str(path))[0] for each in PROMPTS]
        assert (expected == alone) == (path == DEMO)
        assert [ask(front.url, prompt)[1] > 0 for _ in range(2)] == [False, True]
        assert traffic(front, expected, 24) == Outcomes(right=24)


def test_a_client_that_leaves(front, servers):
    def total(name: str) -> int:
        return sum(each.get("/status")["stats"][name] for each in servers)

    body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
    before, end = total("output_tokens"), time.monotonic() + 20
    with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=60) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data"))
    while total("running"):
        assert time.monotonic() < end
    assert 0 < total("output_tokens") - before < 400


@pytest.mark.parametrize("name", ["vllm-router", "dynamo"])
def test_prefill_and_decode(folder, alone, name):
    roles = {role: [worker(role, folder, f"--split-secret={SECRET}", "--transport=tcp", **ENGINE)]
             for role in ("prefill", "decode")}  # fmt: skip
    (prefill,), (decode,) = roles.values()
    with running(prefill, decode), contextlib.closing(Front(name, folder, roles)) as front:
        before = decode.get("/split/status", AUTH)["arrived"]
        assert traffic(front, alone, 24) == Outcomes(right=24)
        assert decode.get("/split/status", AUTH)["arrived"] >= before + 11
        prefill.kill()
        outcomes = traffic(front, alone, 12)
        assert (len(outcomes.errors), outcomes.wrong) == (12, []), "docs/fleets.md says that all are lost"
