"""OpenTelemetry: one span per prompt, if an endpoint is configured. The SDK is optional (extra `traces`).

A span covers a prompt from its arrival at the engine to its last token, continues the client's trace (`traceparent`),
and records information that the response also contains: token counts, cached tokens, times and the finish reason.
Attributes follow OpenTelemetry's conventions for generative models where these define a name. Spans contain no text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mamba_jax.version import install_advice
from serving.config import ConfigError
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.sampling_params import SamplingParams

Note = Callable[[RequestOutput], None]


class Traces:
    """Exports spans of a model to an OTLP/HTTP collector, for example `http://localhost:4318/v1/traces`.

    With None for the endpoint, it imports and creates nothing.

    Raises:
        ConfigError: an endpoint is set but the SDK is not installed.
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
                f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is missing): {install_advice('traces')}"
            ) from None
        # Use a separate provider: the process's global one belongs to the application that embeds this server.
        self._provider = TracerProvider(resource=Resource.create({"service.name": "mamba-jax"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("mamba_jax")

    @contextlib.contextmanager
    def under(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Makes spans that start in this context continue the trace named in an HTTP request's headers."""
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
        """Creates a span for one prompt. Yields a function to call with each delta.

        The span also ends when generation fails (as an error) and when the client disconnects (`mamba_jax.aborted`).
        """
        if self._provider is None:
            yield lambda output: None
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        attributes = {
            "gen_ai.operation.name": "generate",
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.input_tokens": prompt_tokens,
        }
        known = {key: value for key, value in attributes.items() if value is not None}
        span = self._tracer.start_span("generate", kind=SpanKind.SERVER, attributes=known)
        finished, tokens = False, 0
        reasons: dict[int, str] = {}

        def note(output: RequestOutput) -> None:
            nonlocal finished, tokens
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            reasons.update({choice.index: str(choice.finish_reason) for choice in output.outputs})
            if output.finished:
                finished = True
                span.set_attribute("gen_ai.usage.output_tokens", tokens)
                span.set_attribute("gen_ai.response.finish_reasons", [reasons[index] for index in sorted(reasons)])
                span.set_attributes(_result_attributes(output))

        try:
            yield note
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        except BaseException:  # the client disconnected, perhaps after the last token
            if not finished:
                span.set_attribute("mamba_jax.aborted", True)
            raise
        finally:
            span.end()

    def close(self) -> None:
        """Sends the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def _result_attributes(output: RequestOutput) -> dict[str, Any]:
    """Returns the attributes of a finished prompt that its last output has; times are in seconds."""
    attributes: dict[str, Any] = {"mamba_jax.cached_tokens": output.num_cached_tokens}
    if output.miss_reason is not None:
        attributes["mamba_jax.miss_reason"] = output.miss_reason
    metrics = output.metrics
    if metrics is not None:
        times = {
            "mamba_jax.queue_time": metrics.first_scheduled_time,
            "mamba_jax.time_to_first_token": metrics.first_token_time,
            "mamba_jax.e2e_time": metrics.finished_time,
        }
        attributes |= {key: at - metrics.arrival_time for key, at in times.items() if at is not None}
        attributes["mamba_jax.preemptions"] = metrics.num_preemptions
        if metrics.drafts.drafted:
            attributes["mamba_jax.draft_tokens"] = metrics.drafts.drafted
            attributes["mamba_jax.accepted_draft_tokens"] = metrics.drafts.accepted
    return attributes
