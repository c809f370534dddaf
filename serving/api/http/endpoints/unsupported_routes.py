"""Paths of other servers that this server does not support. They answer 404 with the reason."""

from __future__ import annotations

from fastapi import APIRouter

from serving.api.http.errors import ApiError

router = APIRouter(include_in_schema=False)

_PATHS = {
    "this server generates text: the last hidden state of its model is not an embedding; use a model that was trained "
    "for embeddings": ("/v1/embeddings", "/embeddings", "/pooling"),
    "this server generates text: its model was not trained to score or rank; /v1/completions with echo and logprobs "
    "gives the log-probability of a text": ("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    "this server generates text from text": (
        "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations"
    ),
}  # fmt: skip


def _add_unsupported(path: str, why: str) -> None:
    @router.post(path)
    async def unsupported_path() -> None:
        raise ApiError(404, why, code="not_supported")


for _why, _paths in _PATHS.items():
    for _path in _paths:
        _add_unsupported(_path, _why)
