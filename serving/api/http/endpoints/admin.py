"""Endpoints for operators and probes: models, health, readiness, load, version, metrics, status, settings."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from serving.api.http.connection.keys import admin_only
from serving.api.http.connection.streaming import answer
from serving.api.http.context import Context, context_of
from serving.api.http.endpoints.status import hardware, status_of
from serving.api.http.errors import ApiError
from serving.api.http.protocol.common import ModelCard, ModelList

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The model under each of its names, and its adapters."""
    context = context_of(request)
    return answer(ModelList(object="list", data=[_card(context, n) for n in context.model_names]))


@router.get("/v1/models/{name:path}", response_model=ModelCard, tags=["OpenAI"])
async def get_model(name: str, request: Request) -> Response:
    """The model under one of its names."""
    context = context_of(request)
    if name not in context.model_names:
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    return answer(_card(context, name))


@router.get("/ping", tags=["operation"])
@router.post("/ping", tags=["operation"])
@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the engine runs and makes progress; restart the process otherwise."""
    context_of(request).check_alive()
    return JSONResponse({"status": "ok"})


@router.get("/ready", tags=["operation"])
async def ready(request: Request) -> Response:
    """200 when the server accepts requests: the programs of every step are compiled."""
    context_of(request).check(None)
    return JSONResponse({"status": "ready"})


@router.get("/load", tags=["operation"])
async def load(request: Request) -> dict[str, int]:
    """Number of unanswered requests."""
    return {"server_load": context_of(request).engine.num_unfinished}


@router.get("/server_info", tags=["operation"], dependencies=[Depends(admin_only)])
async def server_info(request: Request) -> dict[str, Any]:
    """Version, hardware and current settings, without keys."""
    context = context_of(request)
    scheduler = context.engine.engine.loop.scheduler.config
    sizes = {name: value for name, value in asdict(scheduler).items() if isinstance(value, int | float | str | None)}
    return {
        "version": program_version(),
        "hardware": hardware(context.engine.engines),
        "engine": sizes,
        "server": context.settings.model_dump(mode="json", exclude={"api_key", "admin_key"}),
    }


@router.post("/reset_prefix_cache", tags=["operation"], dependencies=[Depends(admin_only)])
async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached prefixes, on the devices and in the tiers. Running requests keep the state that they use."""
    await context_of(request).engine.call_all(lambda engine: engine.loop.scheduler.drop_cached())
    return JSONResponse({"status": "ok"})


@router.get("/version", tags=["operation"])
async def get_version() -> dict[str, str]:
    """The version of the program."""
    return {"version": program_version()}


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus."""
    context = context_of(request)
    body, kind = context.metrics.exposition(context.engine.latest_stats)
    return Response(body, media_type=kind)


@router.get("/status", tags=["operation"])
async def status(request: Request) -> dict[str, Any]:
    """The data of the status page."""
    return status_of(context_of(request))


def program_version() -> str:
    """Returns the installed version; `unknown` in a checkout that is not installed."""
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
        root=context.adapters.get(name, context.model_name),
        parent=context.model_name if name in context.adapters else None,
        max_model_len=context.engine.engine.max_model_len,
    )
