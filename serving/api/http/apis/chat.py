"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serving.api.http.apis.chat_turn import ChatTurn
from serving.api.http.apis.choices import Choice, ChoicesWriter
from serving.api.http.context import ResponseContext
from serving.api.http.generation import ChoiceDelta
from serving.api.http.parsing.answer import AnswerPiece, AnswerReader
from serving.api.http.parsing.call_pieces import CallPiece, whole_calls
from serving.api.http.protocol.chat import CalledFunction, ChatAnswer, ChatChoice, ChatRequest, ChatResponse, ToolCall


class ChatWriter(ChoicesWriter):
    """Writes the response to one request. `prompts`: the token ids of the conversation, in a list."""

    def __init__(
        self, context: ResponseContext, body: ChatRequest, request: ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        self._turn = ChatTurn(context, request, prompts[0])
        super().__init__(context, request, self._turn.job, self._turn.tally, top=request.top_logprobs or 0)
        self._body = body
        self._readers: dict[int, AnswerReader] = {}

    def _answer(self, choices: Sequence[Choice], *, whole: bool) -> ChatResponse:
        answer = ChatResponse(
            id=self.job.id, object="chat.completion" if whole else "chat.completion.chunk", created=self._created,
            model=self._context.model, choices=[each for each in choices if isinstance(each, ChatChoice)],
        )  # fmt: skip
        if self._body.return_token_ids and (whole or not self._readers):
            answer.prompt_token_ids = list(self.job.prompts[0])
        return answer

    def _events(self, piece: ChoiceDelta) -> Iterator[ChatResponse]:
        """Yields first the role, then new output, then the finish reason."""
        index, new = piece.new.index, piece.new
        if index not in self._readers:
            role = ChatAnswer(role="assistant", content="")
            yield self._answer([ChatChoice(index=index, delta=role, finish_reason=None)], whole=False)
        choice = self._choice(piece, whole=False)
        written = choice.delta is not None and choice.delta.model_fields_set
        if written or new.finished or new.logprobs or self._body.return_token_ids:
            yield self._answer([choice], whole=False)

    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> ChatChoice:
        new = piece.new
        if new.index not in self._readers:
            self._readers[new.index] = self._turn.new_reader()
        reader = self._readers[new.index]
        message = self._message(reader.push(new.text, last=new.finished), whole=whole)
        reason = "tool_calls" if reader.called and new.finish_reason == "stop" else new.finish_reason
        place: dict[str, Any] = {"message": message, "logprobs": None} if whole else {"delta": message}
        choice = ChatChoice(index=new.index, finish_reason=reason, **place)
        if new.logprobs:
            choice.logprobs = self._logprobs.chat(new.token_ids, new.logprobs)
        self._add_details(choice, piece, new.token_ids)
        return choice

    def _message(self, parsed: AnswerPiece, *, whole: bool) -> ChatAnswer:
        """Returns the message, or new output of it; empty without new output, as in OpenAI's last event of a choice."""
        fields: dict[str, Any] = {}
        if parsed.text:
            fields["content"] = parsed.text
        if whole:
            # Content is null if there is only reasoning or calls, and "" for an empty answer.
            fields = {"role": "assistant", "content": None if parsed else ""} | fields
        if parsed.reasoning and self._body.include_reasoning:
            fields["reasoning_content"] = fields["reasoning"] = parsed.reasoning
        if parsed.calls:
            fields["tool_calls"] = whole_calls(parsed.calls) if whole else [_call_delta(call) for call in parsed.calls]
        return ChatAnswer(**fields)


def _call_delta(piece: CallPiece) -> ToolCall:
    if piece.name is None:
        return ToolCall(index=piece.index, function=CalledFunction(arguments=piece.arguments))
    function = CalledFunction(name=piece.name, arguments=piece.arguments)
    return ToolCall(index=piece.index, id=piece.id, type="function", function=function)
