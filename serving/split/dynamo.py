"""A worker of NVIDIA Dynamo in front of a server: `python -m serving.split.dynamo --model DIRECTORY --url URL ...`.

Dynamo's frontend tokenizes, and sends token ids; the worker asks the server's `/v1/completions` for the tokens that
follow. It needs the package ai-dynamo and neither JAX nor a device, so it has an environment of its own. A prefill
worker's ticket goes through the frontend to a decode worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import Disconnected, InvalidArgument, WorkerUnavailable

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_STOPS = ("max_tokens", "min_tokens", "ignore_eos")
_FORMS = ("json", "regex", "choice", "grammar", "structural_tag")
_WATCH = 1.0  # seconds between checks that the server is there
_SILENCE = 600.0  # seconds without data after which a server counts as lost


class ServerEngine(LLMEngine):
    """The server at a URL, as Dynamo sees an engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.mode = options, DisaggregationMode(options.disaggregation_mode)
        timeout = httpx.Timeout(_SILENCE, connect=5.0)
        keys = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._client = httpx.AsyncClient(base_url=options.url, timeout=timeout, headers=keys)
        self._adapters: set[str] = set()
        self._longest: int | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[ServerEngine, WorkerConfig]:
        """Returns the engine and Dynamo's settings for command line arguments."""
        parser = argparse.ArgumentParser(prog="serving.split.dynamo", description="A Dynamo worker for mamba-jax serve")
        parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server.")
        parser.add_argument("--model", required=True, help="Directory with the model's tokenizer and config.json.")
        parser.add_argument("--served-model-name", help="The model's name in requests. Unset: --model.")
        parser.add_argument("--block-size", type=int, default=256, help="The server's --state-block-size.")
        parser.add_argument("--kv-events", help="The endpoint in the server's --kv-events-config. Unset: no events.")
        parser.add_argument("--api-key", help="A key of the server.")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="file", help="file, kubernetes or etcd, as in Dynamo.")
        modes = [mode.value for mode in DisaggregationMode if mode.name != "ENCODE"]
        parser.add_argument("--disaggregation-mode", choices=modes, default=modes[0], help="The server's --role.")
        options = parser.parse_args(argv)
        engine = cls(options)
        return engine, WorkerConfig(
            namespace=options.namespace,
            component="prefill" if engine.mode == DisaggregationMode.PREFILL else "backend",
            model_name=options.model,
            served_model_name=options.served_model_name or options.model,
            discovery_backend=options.discovery_backend,
            event_plane="zmq",
            disaggregation_mode=engine.mode,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        """Returns what the router needs to know of the server, which must be ready."""
        status = (await self._client.get("/status")).raise_for_status().json()
        models = (await self._client.get("/v1/models")).raise_for_status().json()["data"]
        self._adapters = {each["id"] for each in models if each.get("parent")}
        self._longest = models[0].get("max_model_len")
        self._watching = asyncio.create_task(self._watch())
        stats, block = status["stats"], self.options.block_size
        room = stats["pages"]["total"] * stats["page_size"] if "pages" in stats else stats["slots"]["total"] * block
        return EngineConfig(
            model=self.options.model,
            served_model_name=self.options.served_model_name or self.options.model,
            llm=LlmRegistration(context_length=self._longest, kv_cache_block_size=block, total_kv_blocks=room // block),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Returns where the server publishes its states."""
        return [ZmqSource(endpoint=self.options.kv_events)] if self.options.kv_events else []

    async def _watch(self) -> None:
        """Ends this worker when its server has ended, so that the router forgets the server's states."""
        while not self._client.is_closed:
            try:
                await self._client.get("/ping")
            except httpx.ConnectError:
                signal.raise_signal(signal.SIGTERM)
                break
            except httpx.HTTPError:
                pass  # it is busy
            await asyncio.sleep(_WATCH)

    async def is_quiescent(self) -> bool:
        """Returns True: the server holds the states that other servers fetch, and goes on without this worker."""
        return True

    async def cleanup(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the tokens that follow a prompt. Leaving early, as when the client has gone, stops the server's work.

        Raises:
            InvalidArgument: the server refuses the request, or it asks for several choices.
            WorkerUnavailable, Disconnected: another worker may continue it.
        """
        body, last = self._body(request), dict[str, Any]()
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")[:1000]
                    raise (InvalidArgument if 400 <= reply.status_code < 429 else WorkerUnavailable)(text)
                if self.mode == DisaggregationMode.PREFILL:
                    answer = json.loads(await reply.aread())
                    last = {"token_ids": [], "index": 0, "finish_reason": "length", "completion_usage": answer["usage"]}
                    if "kv_transfer_params" not in answer:
                        raise WorkerUnavailable(f"{self.options.url} is not started with --role prefill and a secret")
                    last["disaggregated_params"] = answer["kv_transfer_params"]
                async for line in reply.aiter_lines():
                    if context.is_stopped():
                        yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                        return
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise WorkerUnavailable(event["error"]["message"])
                    for choice in event["choices"]:
                        piece: dict[str, Any] = {"token_ids": choice.get("token_ids") or [], "index": 0}
                        if choice.get("logprobs"):
                            piece["log_probs"] = choice["logprobs"]["token_logprobs"]
                        if choice.get("finish_reason"):
                            last = piece | {"finish_reason": choice["finish_reason"]}
                        elif piece["token_ids"]:
                            yield piece
                    if last and event.get("usage"):
                        last["completion_usage"] = event["usage"]
        except httpx.HTTPError as error:
            raise Disconnected(f"{self.options.url}: {error or type(error).__name__}") from None
        if not last:
            raise Disconnected(f"{self.options.url}: the stream ended early")
        yield last

    def _body(self, request: Any) -> dict[str, Any]:
        sampling, stops = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
        output, nvext = request.get("output_options") or {}, (request.get("extra_args") or {}).get("nvext") or {}
        if (sampling.get("n") or 1) > 1:
            raise InvalidArgument("n must be 1: this worker returns one choice")
        body = {name: sampling.get(name) for name in _SAMPLING} | {name: stops.get(name) for name in _STOPS}
        body |= {"prompt": request["token_ids"], "logprobs": output.get("logprobs")}
        body["cache_salt"] = nvext.get("cache_salt") or (request.get("routing") or {}).get("cache_namespace")
        body["stop_token_ids"] = [*(stops.get("stop_token_ids") or ()), *(stops.get("stop_token_ids_hidden") or ())]
        if (form := sampling.get("guided_decoding")) is not None:
            body["structured_outputs"] = {name: form[name] for name in _FORMS if form.get(name) is not None}
        if body["max_tokens"] is None and self._longest is not None:
            body["max_tokens"] = self._longest - len(request["token_ids"])
        if request.get("model") in self._adapters:
            body["model"] = request["model"]
        if self.mode == DisaggregationMode.PREFILL:
            body |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
            body["kv_transfer_params"] = (request.get("prefill_result") or {}).get("disaggregated_params")
        return {name: value for name, value in body.items() if value is not None}


if __name__ == "__main__":
    run(ServerEngine)
