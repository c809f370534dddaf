"""Endpoints that change a running model: pause, sleep, new weights, and LoRA adapters as in vLLM. Operators only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from serving.api.http.connection.keys import admin_only
from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.engine.changes import common_checksum
from serving.engine.control import PauseMode, WeightsChecksum
from serving.engine.engine import Engine

rollouts = APIRouter(tags=["rollouts"], dependencies=[Depends(admin_only)])
adapters = APIRouter(tags=["adapters"], dependencies=[Depends(admin_only)])

MAX_ADAPTERS = 10_000
"""Maximum number of adapter names. `max_loras` and `max_initial_states` limit the adapters on the device."""


class NewWeightsRequest(BaseModel):
    """Path and version of new weights."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, description="A directory with safetensors files that the server can read.")
    version: str | int | None = Field(None, description="Unset: the next number.")
    partial: bool = Field(False, description="Replace only the weights in these files.")


@rollouts.post("/pause")
async def pause(request: Request, mode: Annotated[PauseMode, Query()] = "abort") -> dict[str, Any]:
    """Stop the engine's steps until /resume; responds when it has stopped. `mode`: what happens to running requests."""
    await context_of(request).engine.pause(mode)
    return await _state_of(request)


@rollouts.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    """End a pause."""
    return await _do(request, lambda engine: engine.control.resume())


@rollouts.post("/update_weights")
async def update_weights(request: Request, body: NewWeightsRequest) -> dict[str, Any]:
    """Replace the model's weights in place, between two steps. Running requests continue with the new weights."""
    await context_of(request).engine.update_weights(body.path, version=body.version, partial=body.partial)
    return await _state_of(request)


@rollouts.get("/weights/checksum")
async def weights_checksum(request: Request) -> WeightsChecksum:
    """Digests of the weights in memory: of all together, and of each."""
    return common_checksum(await context_of(request).engine.call_all(lambda e: e.control.weights_checksum()))


@rollouts.post("/sleep")
async def sleep(request: Request, level: Annotated[int, Query(ge=1, le=2)] = 1) -> dict[str, Any]:
    """Release the memory of states and pages; on level 2 also that of the weights."""
    return await _do(request, lambda engine: engine.control.sleep(level))


@rollouts.post("/wake_up")
async def wake_up(request: Request) -> dict[str, Any]:
    """Allocate the memory for states and pages again."""
    return await _do(request, lambda engine: engine.control.wake_up())


@rollouts.get("/rollout_state")
async def rollout_state(request: Request) -> dict[str, Any]:
    """The version of the weights, and whether the engine is paused or asleep."""
    return await _state_of(request)


async def _do(request: Request, action: Callable[[Engine], Any]) -> dict[str, Any]:
    await context_of(request).engine.call_all(action)
    return await _state_of(request)


async def _state_of(request: Request) -> dict[str, Any]:
    """Returns the state of the engine; of the first held replica, with all versions, if they differ after a failure."""
    states = await context_of(request).engine.call_all(_state)
    versions = dict.fromkeys(state["weights_version"] for state in states)
    return next((state for state in states if state["held"]), states[0]) | {"weights_version": ", ".join(versions)}


def _state(engine: Engine) -> dict[str, Any]:
    control = engine.control
    return {
        "weights_version": control.weights.version,
        "updates": control.weights.updates,
        "update_seconds": control.weights.seconds,
        "paused": control.paused,
        "sleep_level": control.sleep_level,
        "held": control.why_held,
    }


class AdapterName(BaseModel):
    """The name of an adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=256, description="Name of the adapter, as `model` in requests.")
    lora_int_id: int | None = Field(None, description="Not used.")


class NewAdapter(AdapterName):
    """A name and a directory."""

    lora_path: str = Field(
        min_length=1, max_length=4096, description="The adapter's directory, which the server can read."
    )
    load_inplace: bool = Field(False, description="Replace the adapter that has this name.")


@adapters.post("/v1/load_lora_adapter")
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


@adapters.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, body: AdapterName) -> PlainTextResponse:
    """Remove an adapter. Requests that use it keep it until they end."""
    context = context_of(request)
    name = body.lora_name
    if context.engine.engine.adapters is None or context.adapters.pop(name, None) is None:
        raise ApiError(404, f"adapter {name!r} is not loaded", param="lora_name")
    await context.engine.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter {name!r} is removed.")
