"""`LLM`: offline inference with vLLM's interface."""

from __future__ import annotations

import functools
import itertools
import logging
import numbers
import reprlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from checkpoints.tensors.replacement import NewWeights
from checkpoints.tokenizer import Tokenizer
from serving.config import EngineConfig
from serving.core.errors import RequestError
from serving.engine.assembly.build import build_engine
from serving.engine.changes import common_checksum, load_adapter, table_of, weights_update
from serving.engine.control import PauseMode, WeightsChecksum
from serving.engine.engine import Engine
from serving.engine.replicas import ReplicaGroup
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.conversations import Messages, encode_marked
from serving.engine.requests.output import PromptScores, RequestOutput, with_texts
from serving.engine.requests.request import EngineRequest, Prompt, read_marks
from serving.engine.requests.sampling_params import SamplingParams, recommended_sampling
from serving.vllm.flags import engine_flags

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_BETWEEN_TURNS = 0.001
"""Seconds between two steps of a stream that return nothing for it."""
_NEAREST = {
    "beam_search": "use generate with SamplingParams(n=..., logprobs=...) and choose among the outputs",
    "collective_rpc": "use engine, which runs in this process",
    "get_metrics": "use engine.stats(); servers export metrics for Prometheus",
    "llm_engine": "use engine",
    "score": "use generate with SamplingParams(prompt_logprobs=...), which scores texts; the model is no classifier",
    "start_profile": "use jax.profiler.trace",
    **dict.fromkeys(("classify", "embed", "encode", "reward"), "the model generates text; use generate"),
}
"""vLLM's methods that `LLM` does not have, and what to use."""


def _in_turn(method: Callable[Concatenate[LLM, P], R]) -> Callable[Concatenate[LLM, P], R]:
    """Makes calls of a method from several threads run one after the other."""

    @functools.wraps(method)
    def run(self: LLM, /, *args: P.args, **options: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **options)

    return run


class LLM:
    """A model, ready to complete prompts. Any thread may use it; calls that run or change the engine take turns.

        llm = LLM("demo")
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Args:
        model: a Hugging Face directory, an Orbax directory, `demo`, or a hub's name.
        **flags: the engine's flags (see `EngineConfig`), also by vLLM's names: `gpu_memory_utilization=0.8`.

    Raises:
        ConfigError: a bad flag.
        CheckpointError: the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        own, notices = engine_flags(flags)
        own.setdefault("enable_structured_outputs", True)
        for notice in notices:
            log.info(notice)
        built = build_engine(EngineConfig.create(model=None if model is None else str(model), **own))
        self.engines = built.engines
        """All replicas. Without `data_parallel_size` there is one."""
        self.engine = built.engine
        """The engine; with `data_parallel_size` the first of several identical ones."""
        self.front: Engine | ReplicaGroup = built.engine if len(built.engines) == 1 else ReplicaGroup(built.engines)
        """Runs the requests. Callers may use it to add, step and abort requests themselves."""
        self.config = built.config
        self.size = built.size
        """The size of the state store; `size.report()` explains it."""
        self.model = built.model
        self.tokenizer: Tokenizer | None = built.tokenizer
        """The tokenizer; None for a model without tokenizer files, which accepts and returns only token ids."""
        self._token_text: Callable[[int], str] | None = None
        if built.tokenizer is not None:
            self._token_text = functools.lru_cache(1 << 16)(built.tokenizer.token_text)
        self._ids = itertools.count()
        self._streams: dict[str, list[RequestOutput]] = {}
        """Deltas that calls of `stream` have not read yet, by request id."""
        self._turn = threading.RLock()
        """Held by the thread that uses the engine."""

    def __getattr__(self, name: str) -> Any:
        reason = f" ({_NEAREST[name]})" if name in _NEAREST else ""
        raise AttributeError(f"LLM has no attribute {name!r}{reason}", name=name, obj=self)

    @_in_turn
    def close(self) -> None:
        """Writes pending states to `disk_cache` and ends the engine. Leaving a `with` block calls it."""
        self.front.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            RequestError: the model has none.
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: use token ids")
        return self.tokenizer

    @property
    def compilations(self) -> int:
        """Step programs compiled so far. It does not grow after a warm-up."""
        return sum(engine.loop.programs.compilations for engine in self.engines)

    @_in_turn
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in the prompts' order.

        Args:
            prompts: texts, lists or arrays of token ids, or `{"prompt_token_ids": [...]}`; one of them or a list.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a progress bar on a terminal.
            priority: smaller values are served first; one for all, or one per prompt.
            cache_salt: share cached prefixes only with requests of the same salt. A prompt may have one of its own:
                `{"prompt": text, "cache_salt": salt}`. A prompt may also have `cache_marks`: positions from which later
                prompts will continue, `[90]`, or with a time in seconds `[{"position": 90, "ttl": 300}]`.
            lora_request: the adapter; one for all, or one (or None) per prompt.

        Raises:
            RequestError: one of the requests cannot be served as asked; then the engine runs none of them.
        """
        for engine in self.engines:
            if engine.control.why_held is not None:
                raise RequestError(engine.control.why_held)
        single = isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable)
        many: Sequence[Any] = [prompts] if single else list(prompts)
        if many and not single and all(isinstance(token, numbers.Integral) for token in many):
            many = [many]  # one prompt's token ids
        params = _one_each(
            SamplingParams() if sampling_params is None else sampling_params, SamplingParams, many, "sampling_params"
        )
        priorities = _one_each(0 if priority is None else priority, numbers.Integral, many, "priorities")
        adapters = _one_each(lora_request, (LoRARequest, type(None)), many, "lora_request")
        tables: list[Mapping[str, Any]] = [each if isinstance(each, Mapping) else {} for each in many]
        requests = [
            EngineRequest(
                f"generate-{next(self._ids)}", each, param, rank, table.get("cache_salt", cache_salt),
                read_marks(table.get("cache_marks")), lora_request=adapter,
            )
            for each, param, rank, table, adapter in zip(many, params, priorities, tables, adapters, strict=True)
        ]  # fmt: skip
        try:
            self.front.add_all(requests)
            return self._run(requests, use_tqdm)
        except BaseException:
            # Interrupted or refused: abort all, so that a later call does not run them.
            for request in requests:
                self.front.abort(request.request_id)
            raise

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        previous_token_ids: Sequence[Any] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, a list of messages (`{"role", "content"}`), or several.

        `previous_token_ids` holds the earlier turns, for each conversation the ids of a prompt and its answer
        (`[*output.prompt_token_ids, *output.outputs[0].token_ids]`), which are not rendered again. `messages` are then
        those that follow.

        `template` holds arguments of the chat template: `tools`, `chat_template` and the template's variables, which
        `chat_template_kwargs` may hold, too.

        Raises:
            RequestError: the model has no tokenizer, or a request cannot be served as asked.
            ChatTemplateError: the template refuses a conversation.
        """
        if isinstance(messages, (str, Mapping)):
            raise RequestError(
                "messages must be a list of messages, or a list of such lists, got a single "
                f"{'text' if isinstance(messages, str) else 'message'}: use [{{'role': 'user', 'content': ...}}]"
            )
        variables = {**template, **(chat_template_kwargs or {})}
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        earlier: Any = previous_token_ids or [()] * len(conversations)
        earlier = [earlier] if single and isinstance(earlier[0], int) else earlier
        if len(earlier) != len(conversations):
            raise RequestError(f"previous_token_ids must be {len(conversations)} lists, got {len(earlier)}")
        prompts: list[Prompt] = []
        for each, before in zip(conversations, earlier, strict=True):
            if before:
                prompts.append({"prompt_token_ids": self.encode_chat(each, previous_token_ids=before, **variables)})
            else:
                ids, marks = encode_marked(self.get_tokenizer(), each, **variables)
                prompts.append({"prompt_token_ids": ids, "cache_marks": marks})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding the same output as it grows. Closing the iterator aborts the request."""
        request = EngineRequest(f"stream-{next(self._ids)}", prompt, sampling_params or SamplingParams(), live=True)
        unread: list[RequestOutput] = []
        with self._turn:
            self.front.add(request)
            self._streams[request.request_id] = unread
        whole: RequestOutput | None = None
        try:
            while whole is None or not whole.finished:
                with self._turn:
                    if not unread:
                        self._step()
                    arrived = unread.copy()
                    unread.clear()
                for new in arrived:
                    whole = new if whole is None else whole.extend(new)
                if arrived and whole is not None:
                    yield whole
                else:
                    time.sleep(_BETWEEN_TURNS)  # the engine may be paused: another thread has to resume it
        finally:
            with self._turn:
                del self._streams[request.request_id]
                self.front.abort(request.request_id)

    @property
    def weights_version(self) -> str:
        """The name of the current weights in outputs (`weights_versions`)."""
        return self.engine.control.weights.version

    @_in_turn
    def update_weights(self, weights: NewWeights, *, version: str | int | None = None, partial: bool = False) -> str:
        """Replaces the model's weights in place without compiling. See `Control.update_weights`."""
        update = weights_update(self.engines, weights, version=version, partial=partial)
        return str(self.front.call_each(update)[0])

    @_in_turn
    def weights_checksum(self) -> WeightsChecksum:
        """Computes digests of the weights in memory.

        Raises:
            RequestError: the weights are not complete, or replicas have different ones.
        """
        return common_checksum(self.front.call_each(lambda engine: engine.control.weights_checksum()))

    @_in_turn
    def load_lora_adapter(self, name: str, path: str) -> None:
        """Loads or reloads an adapter under a name, without compiling: on all replicas, or on none.

        Raises:
            RequestError: the adapter cannot be loaded.
        """
        load_adapter(name, path, table_of(self.engine).read(name, path), self.front.call_each)

    @_in_turn
    def unload_lora_adapter(self, name: str) -> None:
        """Removes an adapter from all replicas. Requests that use it keep it until they end.

        Raises:
            RequestError: no adapter has this name.
        """
        table_of(self.engine).names.check(name)
        self.front.call_each(lambda engine: table_of(engine).remove(name))

    @_in_turn
    def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes, on the devices and in the tiers. Returns True, as vLLM does."""
        self.front.call_each(lambda engine: engine.loop.scheduler.drop_cached())
        return True

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns parameters with the checkpoint's recommendations (`generation_config.json`). `generate` does not use
        them unless they are passed to it."""
        return SamplingParams(**recommended_sampling(self.config.model))

    @_in_turn
    def pause(self, mode: PauseMode = "abort") -> None:
        """Stops dispatching steps until `resume`; see `Control.pause`. With `wait`, all requests finish first."""
        self.front.call_each(lambda engine: engine.control.pause(mode))
        while not all(engine.control.paused for engine in self.engines):
            self._step()

    @_in_turn
    def resume(self) -> None:
        """Ends a pause."""
        self.front.call_each(lambda engine: engine.control.resume())

    @_in_turn
    def sleep(self, level: int = 1) -> None:
        """Frees the memory of states and pages, on level 2 also that of the weights; see `Control.sleep`."""
        self.front.call_each(lambda engine: engine.control.sleep(level))

    @_in_turn
    def wake_up(self) -> None:
        """Allocates the memory for states and pages again."""
        self.front.call_each(lambda engine: engine.control.wake_up())

    def encode_chat(self, messages: Messages, /, **template: Any) -> list[int]:
        """Returns the token ids of a conversation up to the beginning of the model's turn."""
        return self.get_tokenizer().encode_chat(messages, **template)

    def _step(self) -> list[RequestOutput]:
        """Runs a step for all calls in progress: keeps the deltas of streams, and returns the changed outputs."""
        changed = self.front.step()
        for output in changed:
            if (unread := self._streams.get(output.request_id)) is not None:
                unread.append(output)
        return changed

    def _run(self, requests: Sequence[EngineRequest], show: bool) -> list[RequestOutput]:
        columns = (
            TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )  # fmt: skip
        outputs: dict[str, RequestOutput | None] = dict.fromkeys(request.request_id for request in requests)
        with Progress(*columns, console=Console(stderr=True), disable=not (show and sys.stderr.isatty())) as bar:
            task, tokens = bar.add_task("requests", total=len(outputs), speed=""), 0
            while None in outputs.values():
                for output in self._step():
                    if output.finished and output.request_id in outputs:
                        outputs[output.request_id] = output
                        tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        speed = tokens / max(bar.tasks[task].elapsed or 0, 1e-9)
                        bar.update(task, advance=1, speed=f"{speed:,.0f} tokens/s")
        return [self._decoded(outputs[request.request_id], request) for request in requests]

    def _decoded(self, output: RequestOutput | None, request: EngineRequest) -> RequestOutput:
        """Adds the texts of tokens to a finished output's log-probabilities, if it has text."""
        assert output is not None
        if self._token_text is not None and request.params.detokenize:
            for choice in output.outputs:
                choice.logprobs = choice.logprobs and [with_texts(table, self._token_text) for table in choice.logprobs]
            if isinstance(output.prompt_logprobs, PromptScores):
                output.prompt_logprobs.text_of = self._token_text
        return output


def _one_each(given: Any, kind: type | tuple[type, ...], prompts: Sequence[Any], what: str) -> Sequence[Any]:
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, kind):
        return [given] * len(prompts)
    each = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else None
    wrong = given if each is None else next((one for one in each if not isinstance(one, kind)), None)
    if each is None or not all(isinstance(one, kind) for one in each):
        raise RequestError(
            f"{what}: give one for all prompts, or a list with one per prompt, got {reprlib.repr(wrong)}"
        )
    if len(each) != len(prompts):
        raise RequestError(f"{len(each)} {what} for {len(prompts)} prompts: give one, or one per prompt")
    return each
