"""OpenTelemetry: one span a prompt, where an endpoint for them is named. The SDK is optional (extra `traces`).

A span covers a prompt from its arrival at the engine to its last token, continues the client's trace (`traceparent`),
and carries what the answer says anyway: counts of tokens, what the cache saved, times, and why it ended.
Attributes follow OpenTelemetry's conventions for generative models where these have a name. No text is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from serving.config import ConfigError
from serving.engine.output import RequestOutput
from serving.engine.sampling_params import SamplingParams

Note = Callable[[RequestOutput], None]


class Traces:
    """Where spans go. Without an endpoint, nothing is made and nothing imported.

    Args:
        endpoint: an OTLP/HTTP collector's address for traces, as `http://localhost:4318/v1/traces`; None for no spans.
        model: what the model is called.
    Raises:
        ConfigError: an endpoint, and the SDK is not installed.
    """

    def __init__(self, endpoint: str | None, model: str) -> None:
        self._model = model
        self._provider: Any = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): pip install '.[traces]'"
            ) from None
        # Use a separate provider: the process's global one belongs to the application that embeds this server.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "mamba-jax"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("mamba_jax")

    @contextlib.contextmanager
    def under(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Spans that begin within continue the trace that an HTTP request's headers name."""
        if self._provider is None:
            yield
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(dict(headers), context.Context()))
        try:
            yield
        finally:
            context.detach(token)

    @contextlib.contextmanager
    def request(self, name: str, prompt_tokens: int, params: SamplingParams) -> Iterator[Note]:
        """A span for one prompt. What is yielded is to be called with each of its outputs.

        It also ends where the generation fails, as an error, and where its client leaves (`mamba_jax.aborted`).
        """
        if self._provider is None:
            yield lambda output: None
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        asked = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        span = self._tracer.start_span(
            "generate",
            kind=SpanKind.SERVER,
            attributes={key: value for key, value in asked.items() if value is not None},
        )
        finished = False

        def note(output: RequestOutput) -> None:
            nonlocal finished
            if output.finished:
                finished = True
                span.set_attributes(_told(output))

        try:
            yield note
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        except BaseException:  # the reader has gone, perhaps with all that it wanted
            if not finished:
                span.set_attribute("mamba_jax.aborted", True)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _told(output: RequestOutput) -> dict[str, Any]:
    """Attributes of a finished prompt; times in seconds."""
    told: dict[str, Any] = {
        "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "gen_ai.response.finish_reasons": [str(choice.finish_reason) for choice in output.outputs],
        "mamba_jax.cached_tokens": output.num_cached_tokens,
    }
    if output.miss_reason is not None:
        told["mamba_jax.miss_reason"] = output.miss_reason
    metrics = output.metrics
    if metrics is not None:
        times = {
            "mamba_jax.queue_time": metrics.first_scheduled_time,
            "mamba_jax.time_to_first_token": metrics.first_token_time,
            "mamba_jax.e2e_time": metrics.finished_time,
        }
        told |= {key: at - metrics.arrival_time for key, at in times.items() if at is not None}
        told["mamba_jax.preemptions"] = metrics.num_preemptions
        if metrics.drafts.drafted:
            told["mamba_jax.draft_tokens"] = metrics.drafts.drafted
            told["mamba_jax.accepted_draft_tokens"] = metrics.drafts.accepted
    return told
