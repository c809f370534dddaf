"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`. docs/operations.md lists them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from checkpoints.errors import CheckpointError
from serving.api.http.protocol.common import MAX_STOP_TEXTS, ErrorBody
from serving.core.errors import RequestError, RequestFailed
from serving.engine.engine_thread import EngineStopped
from serving.engine.requests.sampling_params import SamplingParams

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error",
}  # fmt: skip
_ALTERNATIVES = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "tool_choice": "none, auto, required, or an object of type function or allowed_tools that names tools",
    "stop": f"a string or a list of at most {MAX_STOP_TEXTS} strings",
}
"""Accepted values of fields with several types; pydantic would report an error for each type."""
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
_HTTP_MESSAGES = {
    404: "unknown path", 405: "this path does not support this method",
    400: "the body is not valid JSON",  # FastAPI raises it only if the body is not text, or is nested too deeply
}  # fmt: skip
_ANTHROPICS_TYPES = {
    408: "timeout_error", 413: "request_too_large", 500: "api_error", 502: "api_error", 503: "overloaded_error",
}  # fmt: skip
ANTHROPICS = "/v1/messages"
"""Prefix of the paths of Anthropic's API."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Error code at `--max-connections`; such a refusal does not mean that the server is unhealthy."""
OVERFLOW = "context_length_exceeded"
"""Error code of a prompt that is too long."""
_LONGEST = 500  # characters of a message, which may quote the client's input


class ApiError(Exception):
    """An error response; `anthropic` replaces the message on Anthropic's paths."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self._anthropic = anthropic
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the error object."""
        kind = _TYPES.get(self.status, "unavailable_error" if self.status > 500 else "invalid_request_error")
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + " ..."
        return dict(ErrorBody.model_construct(message=message, type=kind, param=self.param, code=self.code))

    def body(self, path: str = "") -> bytes:
        """Returns the error object as JSON, on Anthropic's paths in Anthropic's format. Escapes non-ASCII characters: a
        client may have sent half a surrogate pair."""
        anthropics = path.startswith(ANTHROPICS)
        body = {"type": "error", "error": self.anthropic_fields()} if anthropics else {"error": self.fields()}
        return json.dumps(body).encode()

    def anthropic_fields(self) -> dict[str, Any]:
        """Returns the fields of the error object of Anthropic's API."""
        error = self.fields()
        error["type"] = _ANTHROPICS_TYPES.get(self.status, error["type"])
        if self._anthropic is not None:
            error["message"] = self._anthropic
        return error

    def response(self, path: str = "") -> Response:
        """Returns the HTTP response to a request for `path`."""
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """Returns the error response for an exception that a handler raised."""
    match error:
        case ApiError():
            return error
        case RequestError() if error.retry:
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case RequestError() | CheckpointError():
            # A chat template that refuses a conversation is a CheckpointError.
            param = "messages" if isinstance(error, CheckpointError) else parameter_of(str(error))
            return ApiError(400, str(error), param=param)
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            message = _HTTP_MESSAGES.get(error.status_code, str(error.detail))
            return ApiError(error.status_code, message, headers=error.headers)
        case RequestFailed():
            return ApiError(502, str(error), code="request_failed")
        case EngineStopped():
            return ApiError(503, str(error), code="engine_stopped")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def validated(model: type[Model], values: Any) -> Model:
    """Returns `values` as a request of this class.

    Raises:
        RequestValidationError: a field is invalid.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def install(app: FastAPI) -> None:
    """Installs handlers in `app` that answer known exceptions with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(path_of(request.scope))

    # Any other exception is a bug; `Limits` answers it with 500.
    known = (ApiError, RequestError, RequestFailed, CheckpointError, EngineStopped, RequestValidationError)
    for kind in (*known, HTTPException):
        app.add_exception_handler(kind, answer)


def path_of(scope: Scope) -> str:
    """Returns the path of a request without the proxy's prefix (`--root-path`)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def parameter_of(message: str) -> str | None:
    """Returns the parameter of a `RequestError`: its message starts with the parameter's name. None if it does not."""
    if "structured outputs" in message[:40]:
        return "structured_outputs"
    if message.startswith("structural_tag"):
        return "response_format"
    if message.startswith(("the prompt", "prompt_token_ids", "a prompt")):
        return "prompt"
    first = message.partition(" ")[0].rstrip(":")
    return first if first in _PARAMETERS else None


def _invalid(details: Sequence[Any]) -> ApiError:
    """Returns the first of pydantic's errors, with the name of its field."""
    first = details[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    name = path[0] if path else first.get("ctx", {}).get("param")
    if name in _ALTERNATIVES and first["type"] not in ("missing", "refused"):
        return ApiError(400, f"{name} must be {_ALTERNATIVES[name]}", param=name)
    where = ".".join(part for part in path if not part.startswith(("list[", "function-", "union")))
    what = first["msg"].removeprefix("Value error, ")
    if name is not None and (not where or re.match(rf"{re.escape(where)}\b", what)):  # the message names the fields
        return ApiError(400, what, param=name)
    return ApiError(400, f"{where or 'the body'}: {what[:1].lower()}{what[1:]}", param=name)
