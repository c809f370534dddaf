"""What operators and probes ask: models, health, readiness, version, metrics, status."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from serving.api.http.context import Context, context_of
from serving.api.http.endpoint import answer
from serving.api.http.errors import ApiError
from serving.api.http.protocol.common import ModelCard, ModelList
from serving.api.http.status import status_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The model, under each of its names."""
    context = context_of(request)
    return answer(ModelList(object="list", data=[_card(context, n) for n in context.settings.served_model_name]))


@router.get("/v1/models/{name:path}", response_model=ModelCard, tags=["OpenAI"])
async def get_model(name: str, request: Request) -> Response:
    """One of the names."""
    context = context_of(request)
    if name not in context.settings.served_model_name:
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    return answer(_card(context, name))


@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the engine's thread runs and its steps end; restart the process otherwise."""
    context_of(request).check_alive()
    return JSONResponse({"status": "ok"})


@router.get("/ready", tags=["operation"])
async def ready(request: Request) -> Response:
    """200 once requests are taken: every step has a program that it can run by."""
    context_of(request).check(None)
    return JSONResponse({"status": "ready"})


@router.get("/version", tags=["operation"])
async def get_version() -> dict[str, str]:
    """The version of the program."""
    return {"version": program_version()}


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """Everything that is counted, for Prometheus."""
    context = context_of(request)
    body, kind = context.metrics.exposition(context.engine.latest_stats)
    return Response(body, media_type=kind)


@router.get("/status", tags=["operation"])
async def status(request: Request) -> dict[str, Any]:
    """What the status page shows."""
    return status_of(context_of(request))


def program_version() -> str:
    """As installed; `unknown` for a bare checkout."""
    try:
        return version("mamba-jax")
    except PackageNotFoundError:
        return "unknown"


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=int(context.started),
        owned_by="mamba-jax",
        root=context.model_name,
        max_model_len=context.engine.engine.max_model_len,
    )
