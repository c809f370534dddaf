"""Lines of OpenAI's Batch files: requests to the paths of `TEXT_APIS`, and their responses.

Input: `{"custom_id", "method": "POST", "url", "body"}`.
Output: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
A response is the one that a server gives.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping
from typing import Any

from checkpoints.tokenizer import Tokenizer
from serving.api.http.apis.text_api import TEXT_APIS, Writer, open_writer
from serving.api.http.connection.streaming import json_of
from serving.api.http.context import ResponseContext
from serving.api.http.errors import as_api_error, validated
from serving.api.http.generation import whole
from serving.api.http.parsing.call_formats import form_of
from serving.api.http.parsing.reasoning import reasoning_marks
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput


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
        self._context = ResponseContext(
            TextCodec(tokenizer, max_model_len), model, ServerSettings.create(default_sampling=defaults),
            tool_calls=form_of(tokenizer), reasoning=reasoning_marks(tokenizer),
        )  # fmt: skip

    def read(self, fields: Mapping[str, Any]) -> Writer:
        """Returns a writer for the line; its `job` is for the engine.

        Raises:
            ApiError, RequestError, RequestValidationError: the line is invalid.
        """
        if fields.get("method", "POST") != "POST":
            raise RequestError(f"method must be POST, not {fields['method']!r}")
        url = fields.get("url")
        api = next((api for api in TEXT_APIS.values() if api.path == url), None)
        if api is None:
            paths = [api.path for api in TEXT_APIS.values()]
            raise RequestError(f"url must be one of {', '.join(paths)}, not {url!r}")
        writer = asyncio.run(open_writer(api, self._context, validated(api.request, fields["body"])))
        if len(writer.job.prompts) != 1:
            raise RequestError(f"a line must have one prompt, got {len(writer.job.prompts)}")
        return writer

    @staticmethod
    def written(custom_id: Any, writer: Writer, output: RequestOutput) -> dict[str, Any]:
        """Returns the output line of a finished request."""
        body = json.loads(json_of(writer.response(whole([output], writer.tally))))
        response = {"status_code": 200, "request_id": writer.job.id, "body": body}
        return {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}

    @staticmethod
    def failed(custom_id: Any, error: Exception) -> dict[str, Any]:
        """Returns the output line of a refused request."""
        refusal = as_api_error(error)
        fields = {"code": refusal.code or "invalid_request", "message": refusal.message}
        return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": fields}


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
