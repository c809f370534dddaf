"""The engine runs requests step by step and returns their outputs. Not thread-safe: one caller drives it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from checkpoints.tokenizer import Tokenizer
from serving.core.cache.retention import merged, written_tokens
from serving.core.errors import FinishReason, RequestError, RequestFailed, check_prompt_length
from serving.core.planning.plan import RowResult
from serving.core.requests.request import Request
from serving.engine.control import Control, Weights
from serving.engine.requests.adapters import AdapterTable
from serving.engine.requests.conversations import ChangedPrefixes
from serving.engine.requests.output import PromptScores, RequestMetrics, RequestOutput, read_routed_experts
from serving.engine.requests.request import Choice, EngineRequest, Prompt, UserRequest, check_params, read_prompt
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.loop import PlanError, StepLoop
from serving.engine.steps.results import DispatchedStep
from serving.engine.structured.grammars import Grammars
from serving.engine.structured.mask_workers import FollowedChoice
from serving.engine.structured.reasoning import constraint_of

log = logging.getLogger(__name__)


class Engine:
    """Runs users' requests on a `StepLoop`: text, choices, stop texts, log-probabilities, limits.

    Args:
        loop: runs the steps.
        tokenizer: None serves token ids only.
        weights: the weights of the loop's programs.
        eos_token_ids: tokens that end a text.
        seed: for requests that have no seed.
        grammars: None refuses structured outputs.
        adapters: None refuses requests with adapters.
        experts_per_layer: experts of a token in one layer, if the store records them and outputs return them.
        expert_bytes: bytes of these in all layers.
    """

    def __init__(
        self,
        loop: StepLoop,
        *,
        tokenizer: Tokenizer | None,
        weights: Weights,
        eos_token_ids: Sequence[int],
        seed: int = 0,
        grammars: Grammars | None = None,
        adapters: AdapterTable | None = None,
        experts_per_layer: int = 0,
        expert_bytes: int = 0,
    ) -> None:
        self.loop, self.grammars, self.adapters = loop, grammars, adapters
        self.vocab_size, self.max_logprobs = loop.programs.vocab_size, loop.programs.max_logprobs
        self.max_model_len = loop.scheduler.config.max_model_len
        self.tokenizer, self.eos_token_ids = tokenizer, tuple(eos_token_ids)
        self.control = Control(loop, weights, drain=self.drain, abort_all=self.abort_all)
        """Pauses, sleep and new weights."""
        self._seeds, self._experts_per_layer, self.expert_bytes = random.Random(seed), experts_per_layer, expert_bytes
        self._parents: dict[str, UserRequest] = {}
        self._prefixes = ChangedPrefixes()
        self._changed: dict[str, UserRequest] = {}
        """Requests whose output changed since the last step returned, by request id."""

    def call_each(self, function: Callable[[Engine], Any]) -> list[Any]:
        """Calls a function with this engine; see `ReplicaThreads.call_each`."""
        return [function(self)]

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do or outputs to return."""
        return bool(self._changed) or (self.loop.in_flight if self.control.held else self.loop.busy)

    @property
    def num_unfinished(self) -> int:
        """Requests that have been added and not finished."""
        return len(self._parents)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Queues a request like `add`; `options` are further fields of `EngineRequest`."""
        return self.add(EngineRequest(request_id, prompt, params or SamplingParams(), **options))

    def add(self, request: EngineRequest) -> RequestOutput:
        """Queues a request and returns its output, which later steps fill in, unless they return deltas (`live`).

        Raises:
            RequestError: the request cannot be served as asked. The engine keeps no part of it.
        """
        request_id, params = request.request_id, request.params
        if request_id in self._parents:
            raise RequestError(f"request id {request_id!r} is in use")
        text, ids = read_prompt(request.prompt, self.tokenizer, self.vocab_size)
        check_prompt_length(len(ids), self.max_model_len)
        check_params(params, self.tokenizer, self.vocab_size)
        for mark in request.cache_marks:
            if mark.position > len(ids):
                raise RequestError(f"cache_marks: position {mark.position} is not in the prompt (1 to {len(ids)})")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                most = f"at most {self.max_logprobs} (max_logprobs)"
                raise RequestError(f"{name} must be {most}, got {getattr(params, name)}")
        if params.return_sampling_mask and not self.loop.programs.sampling_masks:
            raise RequestError("return_sampling_mask needs the flag enable_return_sampling_mask")
        output = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )
        if params.prompt_logprobs is not None:
            given = params.prompt_logprob_token_ids or ()
            output.prompt_logprobs = PromptScores(ids, params.prompt_logprobs, given)
        adapter = None
        if request.lora_request is not None:
            if self.adapters is None:
                raise RequestError("a request with an adapter needs the flag enable_lora or max_initial_states")
            adapter = self.adapters.take(request.lora_request, request.adapter_content)
        parent = UserRequest(replace(request, adapter_content=None), output, adapter)  # it may be large
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        for index in range(params.n):
            try:
                self._add_choice(parent, index, seed)
            except RequestError:
                for member in parent.members:
                    self.loop.scheduler.abort(member.request_id)
                self._release_adapter(parent)
                raise
        first = parent.members[0]
        remote, first.transfer.export = request.remote, request.export
        scope = first.progress.content.chain.scope
        if remote is None and request.export is None:
            remote = next(filter(None, (source.find(ids, scope) for source in self.loop.sources)), None)
        if remote is not None and (remote.scope != scope or first.prompt_logprobs):
            remote.source.cancel(remote)
        elif remote is not None:
            first.transfer.remote = remote
        if request.message_digests and (where := self._prefixes.note(request.message_digests, (request.client, scope))):
            self.loop.scheduler.counters.prefixes_changed += 1
            log.info("request %s reuses nothing after this: prefix changed in %s", request_id, where)
        self._parents[request_id] = parent
        return output

    def add_all(self, requests: Iterable[EngineRequest]) -> None:
        """Queues requests like `add`. If it raises an error, the requests before are queued."""
        for request in requests:
            self.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now and returns its output so far; None if there is no such unfinished request.

        The next `step` returns the output too.
        """
        parent = self._end(request_id, FinishReason.ABORT)
        return None if parent is None else parent.output

    def fail(self, request_id: str, reason: str, *, refused: bool = False) -> None:
        """Ends a request with finish reason `error` and `reason` as its stop reason; the next `step` returns it.

        `refused`: the request itself is the cause, so it would fail again if it were sent again.
        """
        parent = self._end(request_id, FinishReason.ERROR, reason)
        if parent is not None:
            parent.output.failure = RequestError(reason) if refused else RequestFailed(reason)

    def _end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> UserRequest | None:
        parent = self._parents.pop(request_id, None)
        if parent is not None:
            for request in parent.members:
                if not request.finished:
                    self.loop.scheduler.finish(request.request_id, reason)
                request.user.finish(str(reason), stop_reason)
            self._finish(parent)
            self._changed[request_id] = parent
        return parent

    def stats(self) -> dict[str, Any]:
        """Returns all counters: requests and pools, steps and their times, compiled programs."""
        counted = self.loop.scheduler.stats()
        return counted | {
            "loop": asdict(self.loop.stats),
            "drafts": self.loop.stats.drafts.summary(),
            "compilations": self.loop.programs.compilations,
            "kernel_fallbacks": len(self.loop.programs.kernels.refused),
            "weights": {"version": self.control.weights.version, "updates": self.control.weights.updates},
            "held": self.control.why_held,
            "page_size": self.loop.scheduler.config.page_size,
            "adapters": None if self.adapters is None else self.adapters.usage,
        }

    def close(self) -> None:
        """Ends every request and writes pending states to the disk tier. The engine cannot be used afterwards."""
        self.abort_all()
        self.loop.mask_workers.close()
        if self.grammars is not None:
            self.grammars.close()
        self.loop.close()

    def abort_all(self) -> None:
        """Ends every request; the next `step` returns their outputs so far."""
        for request_id in list(self._parents):
            self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs that it changed, finished ones included.

        The output of a request with `live` is a delta. That of another request is the same object in each step: copy
        the values that must not change.
        """
        try:
            settled = self.loop.drain() if self.control.held else self.loop.step()
        except PlanError as error:
            log.exception("could not build a step; its requests failed")
            for request in error.requests:
                self.fail(request.user.parent.output.request_id, str(error))
            settled = None
        self._settle(settled)
        for request, reason, refused in self.loop.mask_workers.pop_refused():
            self.fail(request.user.parent.output.request_id, reason, refused=refused)
        # Return everything that ended during this step: there may be no next step.
        changed, self._changed = self._changed, {}
        self.control.stepped()
        return [parent.take() for parent in changed.values()]

    def drain(self) -> None:
        """Settles the step in flight without dispatching another. The next `step` returns the changed outputs."""
        self._settle(self.loop.drain())

    def _settle(self, settled: DispatchedStep | None) -> None:
        if settled is None:
            return
        begin = time.perf_counter()
        now = time.monotonic()
        for request in settled.not_finite:
            parent = request.user.parent
            for member in parent.members:
                if not member.finished:
                    self.loop.scheduler.discard(member.request_id)
            reason = "the model's logits are not finite numbers, because of an overflow or of wrong weights"
            self.fail(parent.output.request_id, reason)
        settled.add_prompt_logprobs()
        lines = settled.decode
        for row, drafted, tokens in zip(lines.rows, lines.drafted, lines.tokens, strict=False):
            output = row.request.user.parent.output
            if drafted and output.metrics is not None and not output.finished:
                output.metrics.drafts.add([drafted], tokens[None])
        for emitted in settled.emitted:
            parent = self._take(settled, emitted, now)
            if parent is not None:
                self._changed[parent.output.request_id] = parent
        self.loop.stats.settle_seconds += time.perf_counter() - begin

    # -- adding --

    def _add_choice(self, parent: UserRequest, index: int, seed: int) -> None:
        given, output, params = parent.given, parent.output, parent.params
        stream = None
        if params.detokenize and self.tokenizer is not None:
            stream = self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        constraint = constraint_of(params.structured_outputs, params.reasoning, self.grammars)
        room = self.max_model_len - len(output.prompt_token_ids)
        request = Request(
            output.request_id if index == 0 else f"{output.request_id}#{index}",
            output.prompt_token_ids,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids or (),
            eos_token_ids=self.eos_token_ids,
            ignore_eos=params.ignore_eos,
            priority=given.priority,
            cache_salt=given.cache_salt,
            marks=merged(given.cache_marks if index == 0 else ()),
            adapter=None if parent.adapter is None else parent.adapter.digest,
            initial_slot=0 if parent.adapter is None else parent.adapter.initial_slot,
            prompt_logprobs=params.prompt_logprobs is not None and index == 0,
            lockstep=constraint is not None,
            fork_of=output.request_id if index else None,
            client=given.client,
            batch_id=given.batch_id,
            sampling=params if index == 0 else replace(params, prompt_logprobs=None, prompt_logprob_token_ids=None),
        )
        followed = None if constraint is None else FollowedChoice(constraint)
        request.user = choice = Choice(parent, index, stream, seed=seed, followed=followed)
        self.loop.scheduler.add(request)
        if followed is not None:
            self.loop.mask_workers.submit(request, followed, ())
        parent.members.append(request)
        parent.choices.append(choice)
        output.outputs.append(choice.output)

    # -- taking results --

    def _take(self, settled: DispatchedStep, emitted: RowResult, now: float) -> UserRequest | None:
        request = emitted.request
        choice: Choice = request.user
        parent = choice.parent
        output = parent.output
        if choice.finished:
            return None
        tokens, complete, followed = emitted.tokens, False, choice.followed
        if followed is not None:
            tokens = tokens[: followed.advance(tokens)]
            complete = followed.constraint.finished
            if followed.constraint.error is not None:
                self.fail(output.request_id, f"structured outputs: {followed.constraint.error}", refused=True)
                return None
        tables = masks = None
        if tokens and (parent.params.logprobs is not None or parent.params.return_sampling_mask):
            lines, at = settled.place(emitted.row)
            if parent.params.logprobs is not None:
                tables = lines.tables(at, tokens, parent.params.logprobs)
            masks = None if lines.sampling_mask is None else lines.sampling_mask[at]
        by_token = request.finish_reason is FinishReason.STOP and len(tokens) == len(emitted.tokens)
        if choice.append(tokens, tables, masks, ended=by_token, version=self.control.weights.version):
            if not request.finished:
                self.loop.scheduler.finish(request.request_id, FinishReason.STOP)
        elif complete and not by_token:
            choice.finish("stop")
            if not request.finished:
                self.loop.scheduler.finish(request.request_id, FinishReason.STOP)
        elif request.finished:
            asked = request.stop_reason in (parent.params.stop_token_ids or ())
            choice.finish(str(request.finish_reason), request.stop_reason if by_token and asked else None)
        elif parent.given.live:
            choice.refresh()
        if followed is not None and not request.finished:
            self.loop.mask_workers.submit(request, followed, choice.proposed)
        metrics = output.metrics
        if metrics is not None and metrics.first_token_time is None and emitted.tokens:
            metrics.first_token_time = now
        if choice.index == 0:
            lookup = request.lookup
            output.num_cached_tokens = lookup.num_cached_tokens
            output.miss_reason = str(lookup.miss_reason) if lookup.miss_reason else None
            written = written_tokens(lookup.published, lookup.num_cached_tokens)
            output.cache_write_tokens = {**written, **lookup.written_elsewhere}
        wants_experts = self._experts_per_layer and parent.given.return_experts
        if choice.finished and wants_experts and self.loop.store is not None:
            count = len(output.prompt_token_ids) + choice.num_tokens - 1
            choice.output.recorded_experts = read_routed_experts(
                self.loop.store, emitted.row, count, per_layer=self._experts_per_layer
            )
        if choice.finished and all(each.finished for each in parent.choices):
            self._finish(parent)
            del self._parents[output.request_id]
        return parent

    def _release_adapter(self, parent: UserRequest) -> None:
        if parent.adapter is not None and self.adapters is not None:
            self.adapters.release(parent.adapter)

    def _finish(self, parent: UserRequest) -> None:
        parent.output.finished = True
        self._release_adapter(parent)
        if parent.output.metrics is not None:
            parent.output.metrics.finished_time = time.monotonic()
            parent.output.metrics.num_preemptions = sum(request.queueing.num_preemptions for request in parent.members)
