"""A real server on a free port of loopback: uvicorn in a thread, over an engine with the demo model."""

import contextlib
import json
import socket
import threading
from functools import partial

import httpx
import openai
from fastapi.testclient import TestClient

from checkpoints.load import generation_config, load_model
from checkpoints.tokenizer import load_tokenizer
from serving.api.http.app import create_app
from serving.api.http.connection.server import STEP_TIMEOUT, Server
from serving.api.http.settings import ServerSettings
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.assembly.drafting import draft_source
from serving.engine.async_engine import AsyncEngine
from serving.engine.steps.warm_up import warm_up
from tests.support.engines.engines import use_widest_steps
from tests.support.engines.step_programs import shared_programs
from tests.support.fleets import processes
from tests.support.waiting import comes_true, is_ready

ENGINE = processes.ENGINE | {
    "max_num_seqs": 8, "num_slots": 60, "num_pages": 160, "speculative_method": "ngram", "num_speculative_tokens": 2,
    "adaptive_drafts": False, "max_num_waiting": 200, "enable_structured_outputs": True, "warmup": False,
    "replay_interval": 1,
}  # fmt: skip


@contextlib.contextmanager
def running(app, bounds, *, leave=lambda: None, **options):
    """Any application on a bounded server, in a thread: yields the server and its URL."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=200)
    server = Server(app, bounds, drain_timeout=1.0, leave=leave, **options)
    thread = threading.Thread(target=partial(server.run, sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


@contextlib.contextmanager
def in_process(engines, prepare=None, **settings):
    """A client of a server without sockets, over an engine or replicas, when it is ready."""
    front = AsyncEngine(engines)
    chosen = ServerSettings.create(**{"served_model_name": "tiny"} | settings)
    with TestClient(create_app(front, chosen, prepare=prepare)) as client:
        assert comes_true(lambda: client.get("/ready").status_code == 200 or not front.running, 600, every=0.01)
        assert front.running
        yield client


def warmed_up(engine) -> None:
    """Compiles an engine's programs, as `prepare`."""
    warm_up(engine.loop, engine.vocab_size, progress=False)


def completed(client, prompt=(5, 6, 7) * 6, headers=None, **fields):
    """A greedy completion by a client of `in_process`."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True} | fields
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def last_error(text):
    """The error that a stream ends with."""
    *_, last, done = [line for line in text.splitlines() if line]
    assert done == "data: [DONE]"
    return json.loads(last[6:])["error"]


class LiveServer:
    """Starts at once; `close` drains and stops it."""

    def __init__(self, engine, *, drain_timeout=30.0, routers=(), prepare=True, listening=None, **settings) -> None:
        self.async_engine = AsyncEngine(engine)
        listening = listening or socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        chosen = ServerSettings.create(**({"served_model_name": "demo", "log_requests": False} | settings))
        app = create_app(self.async_engine, chosen, routers=routers, prepare=warmed_up if prepare else None)
        self.context = app.state.context
        leave = partial(self.async_engine.shutdown, STEP_TIMEOUT)
        self.uvicorn = Server(app, chosen, drain_timeout=drain_timeout, leave=leave, root_path=chosen.root_path)
        self.thread = threading.Thread(target=partial(self.uvicorn.run, sockets=[listening]), daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_until_ready(self, seconds=900.0) -> None:
        assert comes_true(lambda: is_ready(self.url), seconds), "the server does not become ready"

    def openai(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "-", "max_retries": 0} | options))

    def complete(self, prompt="The state of", **fields):
        """A greedy completion; the response as it is."""
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
        return self.http.post("/v1/completions", json=body)

    def metric(self, name: str) -> float:
        """One value of /metrics; `name` with its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)

    def assert_idle(self, seconds=30.0) -> None:
        """Waits until nothing is in use any more, then checks both pools."""

        def rests() -> bool:
            stats = self.http.get("/status").json()["stats"]
            used = stats["running"] or stats["waiting"] or stats["slots"]["used"]
            return not used and not self.async_engine.num_unfinished  # the numbers may be a moment old

        comes_true(rests, seconds)
        engine = self.async_engine.engine
        assert engine.num_unfinished == 0
        engine.loop.scheduler.check(idle=True)

    def other_server(self, engine=None, **options):
        """Another server, over `engine` or one of its own with the programs of this one's. The caller closes it."""
        other = LiveServer(engine or self.other_engine(), prepare=False, **options)
        other.wait_until_ready()
        return other

    def other_engine(self):
        """An idle engine with the programs of this one's."""
        engine = make_engine()
        engine.loop.programs = self.async_engine.engine.loop.programs
        return engine

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def make_engine(**flags):
    config = EngineConfig.create(**(ENGINE | flags))
    model = load_model(config.model, dtype="float32", progress=False)
    programs = shared_programs(
        model, tile_size=config.tile_size, source=draft_source(config, model.config), greedy=False,
        compiler_options={"xla_backend_optimization_level": 1},  # a step takes a third of the time, of thousands
    )  # fmt: skip
    tokenizer, eos = load_tokenizer(config.model), generation_config(config.model).eos_token_ids
    engine = assemble(config, model, tokenizer=tokenizer, eos_token_ids=eos, programs=programs).engine
    use_widest_steps(engine)
    return engine
