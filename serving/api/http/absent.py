"""Paths of other servers that there is nothing behind: a clear 404 rather than one that leaves people guessing."""

from __future__ import annotations

from fastapi import APIRouter

from serving.api.http.errors import ApiError

router = APIRouter(include_in_schema=False)

_WHY = {
    "embeddings": "this server generates text: the last hidden state of such a model is no embedding; use a model that "
    "was trained for them",
    "scores": "this server generates text: its model was not trained to score or to rank; /v1/completions with echo "
    "and logprobs gives the log-probability of a text",
    "media": "this server generates text from text",
}
_PATHS = {
    "/v1/embeddings": "embeddings", "/embeddings": "embeddings", "/pooling": "embeddings", "/classify": "scores",
    "/score": "scores", "/v1/score": "scores", "/rerank": "scores", "/v1/rerank": "scores", "/v2/rerank": "scores",
    "/v1/audio/transcriptions": "media", "/v1/audio/translations": "media", "/v1/audio/speech": "media",
    "/v1/images/generations": "media",
}  # fmt: skip


def _absent(path: str, why: str) -> None:
    @router.post(path)
    async def absent() -> None:
        raise ApiError(404, why, code="not_supported")


for _path, _kind in _PATHS.items():
    _absent(_path, _WHY[_kind])
