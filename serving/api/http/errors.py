"""Whatever goes wrong as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`.

| status | type | when |
|---|---|---|
| 400 | invalid_request_error | malformed JSON, wrong types, values out of range, prompts that are too long |
| 401 | authentication_error | no API key or a wrong one, where the server has keys |
| 403 | permission_error | a path of operators, without their key |
| 404 | not_found_error | unknown model or path |
| 405, 408, 413, 415 | invalid_request_error | method, a body that is too slow, too large, or not JSON |
| 429 | rate_limit_error | the queue is full (`Retry-After` says when to come back) |
| 500 | server_error | a bug; the log has the rest |
| 502 | unavailable_error | given up: another worker's state did not come (policy `fail`), logits are not finite |
| 503 | unavailable_error | still compiling, shutting down, too many connections, or the engine has failed |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from checkpoints.errors import CheckpointError
from serving.api.http.protocol.common import MAX_STOP_TEXTS, ErrorBody
from serving.engine.async_engine import EngineStopped
from serving.engine.request_error import RequestError, RequestFailed
from serving.engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
}
_ALTERNATIVES = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "tool_choice": "none, auto, required, or an object of type function or allowed_tools that names tools",
    "stop": f"a string or a list of at most {MAX_STOP_TEXTS} strings",
}
"""What fields of several types take: pydantic would complain of each type by itself."""
_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
ANTHROPICS = "/v1/messages"
"""What their paths begin with."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""Code of a refusal at `--max-connections`, which says nothing about the server's health."""
_LONGEST = 500  # characters of a message: it may quote what the client sent


class ApiError(Exception):
    """An answer other than success; `anthropic` is the message on Anthropic's paths, if it is another there."""

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
        """What the error object holds."""
        kind = _TYPES.get(self.status, "unavailable_error" if self.status > 500 else "invalid_request_error")
        message = self.message if len(self.message) <= _LONGEST else self.message[:_LONGEST] + " ..."
        return dict(ErrorBody.model_construct(message=message, type=kind, param=self.param, code=self.code))

    def body(self, path: str = "") -> bytes:
        """The error object. Escapes everything beyond ASCII: a client may have sent half a surrogate pair.

        On Anthropic's paths it has their `type`.
        """
        if not path.startswith(ANTHROPICS):
            return json.dumps({"error": self.fields()}).encode()
        error = self.fields()
        if self._anthropic is not None:
            error["message"] = self._anthropic
        return json.dumps({"type": "error", "error": error}).encode()

    def response(self, path: str = "") -> Response:
        """The same as a response to a request of that path."""
        return Response(self.body(path), self.status, self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception that a handler raised."""
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
            return ApiError(error.status_code, _said(error), headers=error.headers)
        case RequestFailed():
            return ApiError(502, str(error), code="request_failed")
        case EngineStopped():
            return ApiError(503, str(error), code="engine_stopped")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details")


def install(app: FastAPI) -> None:
    """Make `app` answer every exception with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.scope["path"].removeprefix(request.scope.get("root_path", "")))

    # Anything else is a bug, which `Limits` answers for.
    known = (ApiError, RequestError, RequestFailed, CheckpointError, EngineStopped, RequestValidationError)
    for kind in (*known, HTTPException):
        app.add_exception_handler(kind, answer)


def _said(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is nothing at this path"
    if error.status_code == 405:
        return "this path does not take this method"
    if error.status_code == 400:  # the only one that FastAPI raises: the body is no text, or nested too deeply
        return "the body is not valid JSON"
    return str(error.detail)


def parameter_of(message: str) -> str | None:
    """The parameter that a `RequestError` is about: its message begins with the name, where it is about one."""
    if message.startswith("structured outputs"):
        return "structured_outputs"
    if message.startswith(("the prompt", "prompt_token_ids", "a prompt")):
        return "prompt"
    first = message.partition(" ")[0].rstrip(":")
    return first if first in _PARAMETERS else None


def _invalid(details: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints, with the field it is about."""
    first = details[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    path = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    name = path[0] if path else first.get("ctx", {}).get("param")
    if name in _ALTERNATIVES and first["type"] != "missing":
        return ApiError(400, f"{name} must be {_ALTERNATIVES[name]}", param=name)
    where = ".".join(part for part in path if not part.startswith(("list[", "function-", "union")))
    what = first["msg"].removeprefix("Value error, ")
    if not where and name is not None:  # about several fields: the message names them
        return ApiError(400, what, param=name)
    return ApiError(400, f"{where or 'the body'}: {what[:1].lower()}{what[1:]}", param=name)
