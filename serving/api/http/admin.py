"""What operators and probes ask: models, health, readiness, load, version, metrics, status, settings."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from serving.api.http.context import Context, context_of
from serving.api.http.endpoint import answer
from serving.api.http.errors import ApiError
from serving.api.http.keys import admin_only
from serving.api.http.protocol.common import ModelCard, ModelList
from serving.api.http.status import hardware, status_of

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


@router.get("/ping", tags=["operation"])
@router.post("/ping", tags=["operation"])
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


@router.get("/load", tags=["operation"])
async def load(request: Request) -> dict[str, int]:
    """How many requests have not been answered."""
    return {"server_load": context_of(request).engine.num_unfinished}


@router.get("/server_info", tags=["operation"], dependencies=[Depends(admin_only)])
async def server_info(request: Request) -> dict[str, Any]:
    """Version, hardware, and the settings in force, without keys."""
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
    """Drop all cached prefixes, on the devices and in the tiers below them. Requests that run keep what they use."""
    await context_of(request).engine.call_all(lambda engine: engine.loop.scheduler.drop_cached())
    return JSONResponse({"status": "ok"})


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
