"""Endpoints that load and remove LoRA adapters, with the paths and fields of vLLM. Operators only."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from serving.api.http.connection.keys import admin_only
from serving.api.http.context import context_of
from serving.api.http.errors import ApiError

router = APIRouter(tags=["adapters"], dependencies=[Depends(admin_only)])

MAX_ADAPTERS = 10_000
"""Maximum number of adapter names. `max_loras` and `max_initial_states` limit the adapters on the device."""


class NewAdapter(BaseModel):
    """A name and a directory."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256, description="Name of the adapter, as `model` in requests.")
    lora_path: str = Field(min_length=1, description="The adapter's directory, which the server can read.")
    load_inplace: bool = Field(False, description="Replace the adapter that has this name.")


class AdapterName(BaseModel):
    """The name of a loaded adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, description="Not used.")


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request, body: NewAdapter) -> PlainTextResponse:
    """Load an adapter on all replicas, or on none. Cached states are found by content, never by name."""
    context = context_of(request)
    if context.engine.engine.adapters is None:
        raise ApiError(400, "adapters need the flag --enable-lora or --max-initial-states")
    name, path = body.lora_name, body.lora_path
    if name in context.settings.served_model_name:
        raise ApiError(400, f"{name!r} is the name of the model; choose another name", param="lora_name")
    if name in context.adapters and not body.load_inplace:
        raise ApiError(400, f"adapter {name!r} is loaded; set load_inplace to replace it", param="lora_name")
    if name not in context.adapters and len(context.adapters) >= MAX_ADAPTERS:
        raise ApiError(400, f"{MAX_ADAPTERS} adapters are loaded; unload one first", param="lora_name")
    await context.engine.load_adapter(name, path)
    context.adapters[name] = path
    return PlainTextResponse(f"Success: LoRA adapter {name!r} is loaded.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, body: AdapterName) -> PlainTextResponse:
    """Remove an adapter. Requests that use it keep it until they end."""
    context = context_of(request)
    name = body.lora_name
    if context.engine.engine.adapters is None or context.adapters.pop(name, None) is None:
        raise ApiError(404, f"adapter {name!r} is not loaded", param="lora_name")
    await context.engine.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} is removed.")
