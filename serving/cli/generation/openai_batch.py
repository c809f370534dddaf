"""Lines of OpenAI's Batch files: requests to `/v1/completions` and `/v1/chat/completions`, and their responses.

Input: `{"custom_id", "method": "POST", "url", "body"}`.
Output: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
The server's pydantic models read and write the bodies.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from checkpoints.tokenizer import Tokenizer
from serving.api.http.chat_turn import ChatTurn, messages_of, template_options
from serving.api.http.endpoints.chat import ChatWriter
from serving.api.http.endpoints.completions import CompletionWriter
from serving.api.http.errors import as_api_error
from serving.api.http.generation import ResponseContext
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.text import TextCodec
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput

Writer = CompletionWriter | ChatWriter
Model = TypeVar("Model", bound=BaseModel)


def is_batch_line(fields: Mapping[str, Any] | str) -> bool:
    """Returns whether a line of input is in OpenAI's format."""
    return isinstance(fields, Mapping) and "custom_id" in fields and "body" in fields


class BatchLines:
    """Reads lines in OpenAI's format and writes the responses.

    Args:
        tokenizer: the model's tokenizer; None if it has none.
        model: the model's name in responses.
        defaults: sampling parameters for fields that lines omit.
        max_model_len: the model's maximum length.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, model: str, defaults: Mapping[str, Any], *, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._responses = ResponseContext(TextCodec(tokenizer, max_model_len), model, defaults)

    def read(self, fields: Mapping[str, Any]) -> Writer:
        """Returns a writer for the line; its `job` is for the engine.

        Raises:
            RequestError: the line is invalid.
        """
        url, body = fields.get("url"), fields["body"]
        if fields.get("method", "POST") != "POST":
            raise RequestError(f"method must be POST, not {fields['method']!r}")
        if url == "/v1/chat/completions":
            return self._chat(_parsed(ChatRequest, body))
        if url == "/v1/completions":
            return self._completion(_parsed(CompletionRequest, body))
        raise RequestError(f"url must be /v1/completions or /v1/chat/completions, not {url!r}")

    @staticmethod
    def written(custom_id: Any, writer: Writer, output: RequestOutput) -> dict[str, Any]:
        """Returns the output line of a finished request."""
        body = writer.response([output]).model_dump(mode="json", exclude_unset=True)
        response = {"status_code": 200, "request_id": writer.job.id, "body": body}
        return {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}

    @staticmethod
    def failed(custom_id: Any, error: Exception) -> dict[str, Any]:
        """Returns the output line of a refused request."""
        refusal = as_api_error(error)
        fields = {"code": refusal.code or "invalid_request", "message": refusal.message}
        return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": fields}

    def _chat(self, body: ChatRequest) -> ChatWriter:
        prompt = self._require().encode_chat(messages_of(body), **template_options(body, {}))
        return ChatWriter(self._responses, body, ChatTurn(self._responses, body, prompt))

    def _completion(self, body: CompletionRequest) -> CompletionWriter:
        if len(body.prompts) != 1:
            raise RequestError(f"a line must have one prompt, got {len(body.prompts)}")
        (prompt,) = body.prompts
        if isinstance(prompt, str):
            ids = self._require().encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            ids, prompt = prompt, self._require().decode(prompt, skip_special_tokens=False) if body.echo else ""
        return CompletionWriter(self._responses, body, [ids], [prompt] if body.echo else [])

    def _require(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as token ids")
        return self._tokenizer


def _parsed(model: type[Model], body: Any) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise RequestError(as_api_error(RequestValidationError(error.errors())).message) from None


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
