"""Answers as responses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import Response

from serving.api.http.protocol.common import RequestModel

IGNORED = "x-ignored-fields"
_NAMES = 16


def answer(model: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """A model as JSON, with the fields that were set."""
    return Response(model.model_dump_json(exclude_unset=True), headers=headers, media_type="application/json")


def ignored_header(request: RequestModel) -> dict[str, str]:
    """Names the fields of a request that had no effect. They come from the client, so only harmless names are told."""
    names = [name for name in request.ignored if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {IGNORED: ",".join(names[:_NAMES])} if names else {}
