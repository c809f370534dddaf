"""Paths of other servers that this server does not support. They answer 404 with the reason."""

from __future__ import annotations

from fastapi import APIRouter

from serving.api.http.errors import ApiError

router = APIRouter(include_in_schema=False)

_WHY = {
    "embeddings": "this server generates text: the last hidden state of its model is not an embedding; use a model "
    "that was trained for embeddings",
    "scores": "this server generates text: its model was not trained to score or rank; /v1/completions with echo "
    "and logprobs gives the log-probability of a text",
    "media": "this server generates text from text",
}
_PATHS = {
    "/v1/embeddings": "embeddings", "/embeddings": "embeddings", "/pooling": "embeddings", "/classify": "scores",
    "/score": "scores", "/v1/score": "scores", "/rerank": "scores", "/v1/rerank": "scores", "/v2/rerank": "scores",
    "/v1/audio/transcriptions": "media", "/v1/audio/translations": "media", "/v1/audio/speech": "media",
    "/v1/images/generations": "media",
}  # fmt: skip


def _add_unsupported(path: str, why: str) -> None:
    @router.post(path)
    async def unsupported_path() -> None:
        raise ApiError(404, why, code="not_supported")


for _path, _kind in _PATHS.items():
    _add_unsupported(_path, _WHY[_kind])
