"""One turn of a conversation, for all chat APIs: the job for the engine, and the readers for its text."""

from __future__ import annotations

import dataclasses
import uuid

from checkpoints.text.chat import plain_message
from serving.api.http.apis.inputs import messages_of, offered_tools, sampling_params, unenforced
from serving.api.http.context import ResponseContext
from serving.api.http.generation import Job, UsageCounter
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.formats import FORMATS, ReasoningCount, ReasoningStart, opening_of
from serving.api.http.parsing.grammars import calls_grammar
from serving.api.http.protocol.chat import AllowedTools, ChatRequest, NamedTool, Tool, ToolChoices
from serving.api.http.protocol.common import OF_GRAMMAR
from serving.core.errors import RequestError
from serving.engine.requests.conversations import message_digests
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammars import StructuredOutputs
from serving.engine.structured.reasoning import Reasoning


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Returns the functions of which the model must call at least one; empty if no call is required."""
    match request.tool_choice:
        case "required" | AllowedTools(allowed_tools=ToolChoices(mode="required")):
            return offered_tools(request)
        case NamedTool() as choice:
            return [tool for tool in request.tools or () if tool.function.name == choice.function.name]
    return []


class ChatTurn:
    """One turn of a conversation, from a request in the format of `/v1/chat/completions` and its token ids.

    Raises:
        RequestError: the request combines incompatible options.
    """

    def __init__(
        self, context: ResponseContext, request: ChatRequest, prompt: list[int], *, prefix: str = "chatcmpl-"
    ) -> None:
        self._tools = offered_tools(request)
        forced = forced_tools(request)
        self._forced = bool(forced)
        self._form = context.tool_calls if self._tools else None
        self._most_calls = None if request.parallel_tool_calls else 1
        params = sampling_params(request, context.settings.default_sampling)
        answer = None
        outputs = params.structured_outputs
        if self._form is not None and request.response_format is not None and outputs and outputs.grammar is None:
            answer = outputs.json or {"type": "object"}  # JSON or a call
        if forced:
            self._form = context.tool_calls or "hermes"
            if request.structured_outputs is not None:
                raise RequestError("structured outputs cannot be combined with a tool_choice that forces a call")
        if forced or answer is not None:
            assert self._form is not None
            parallel = request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)
            token_ids = context.codec.special_ids(FORMATS[self._form].marks)
            grammar = calls_grammar(
                self._form, forced or self._tools, parallel=parallel, token_ids=token_ids,
                answer=None if forced else answer,
            )  # fmt: skip
            params = dataclasses.replace(params, structured_outputs=StructuredOutputs(grammar=grammar))
        if self._form is not None:
            params = context.codec.showing(params, *FORMATS[self._form].marks)
        tokenizer, self._marks, self._opening = context.codec.tokenizer, context.reasoning, ReasoningStart(False, False)
        count: ReasoningCount | None = None
        if self._marks is not None and tokenizer is not None:
            self._opening = opening_of(tokenizer, prompt, self._marks)
            if not self._opening.ended:
                params = self._with_reasoning(context, params, request.thinking_budget)
                style = None if self._form is None else FORMATS[self._form]
                until = style.begin if style is not None and style.ends_reasoning else None
                count = ReasoningCount.of(tokenizer, self._marks, begun=self._opening.begun, until=until)
        digests = message_digests([*map(plain_message, messages_of(request, context.omitted))], request.tools)
        asked = EngineRequest(
            f"{prefix}{uuid.uuid4().hex}", "", params, request.priority, request.cache_salt, message_digests=digests
        )
        as_text = self._form is not None and FORMATS[self._form].syntax.value_ends  # values in which grammars apply
        ignored = [w for w in unenforced(request, forced) if not (as_text and w.endswith(OF_GRAMMAR))]
        self.job = Job(asked, [prompt], ignored=ignored)
        self.tally = UsageCounter(self.job, reasoning=count)

    def new_reader(self) -> AnswerReader:
        """Returns a reader for the text of one choice."""
        return AnswerReader(
            self._form, self._tools, most=self._most_calls, forced=self._forced,
            marks=None if self._opening.ended else self._marks, begun=self._opening.begun,
        )  # fmt: skip

    def _with_reasoning(self, context: ResponseContext, params: SamplingParams, budget: int | None) -> SamplingParams:
        assert self._marks is not None
        params = context.codec.showing(params, self._marks.end)
        begin, end = self._marks
        if params.stop:
            params = dataclasses.replace(params, stop_after=("" if self._opening.begun else begin, end))
        if params.structured_outputs is None and budget is None:
            return params  # without a grammar or a budget, the engine does not need to distinguish reasoning
        reasoning = Reasoning(begin, end, begun=self._opening.begun, budget=budget)
        return dataclasses.replace(params, reasoning=reasoning)
