"""The server's start-up log."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from serving.api.http.settings import ServerSettings
from serving.engine.assembly.build import AssembledEngine
from serving.engine.assembly.devices import describe


def startup_lines(built: AssembledEngine, settings: ServerSettings, url: str) -> Iterator[str]:
    """Yields one line per topic: model, devices, kernels, sizes, cache, drafts and addresses."""
    config, model = built.config, built.model.config
    device = jax.devices()[0]
    scheduler = built.engine.loop.scheduler.config
    dtype = built.model.dtype
    yield f"model     {config.model} ({model.family}), {built.model.num_parameters:,} parameters, {dtype}"
    programs = built.engine.loop.programs
    meshes = [engine.loop.programs.mesh for engine in built.engines]
    yield f"device    {describe(meshes)} ({device.platform}), JAX {jax.__version__}"
    if programs.compilations:
        yield f"kernels   {programs.kernels.report().partition(': ')[2]}"
    each = ", each replica" if len(built.engines) > 1 else ""
    lengths = f"{scheduler.max_num_seqs} sequences of up to {scheduler.max_model_len:,} tokens"
    yield f"serves    {lengths}, {scheduler.max_num_batched_tokens:,} tokens a step{each}"
    slots, pages = scheduler.num_slots - 1, max(scheduler.num_pages - 1, 0)
    caching = f"mode {scheduler.cache_mode}" if scheduler.cache_mode != "none" else "off"
    yield f"caching   {caching}, {slots:,} state slots, {pages:,} pages of {scheduler.page_size} tokens{each}"
    source = config.speculative_model or config.speculative_method or "the model decides"
    drafts = f"{config.num_speculative_tokens} ({source})"
    yield f"drafts    {drafts if config.num_speculative_tokens else 'off'}"
    names = ", ".join(settings.served_model_name)
    yield f"clients   {url}/v1, model {names}, {'API key needed' if settings.api_key else 'no API key'}"
    yield f"status    {url}/ (status page), {url}/metrics"
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.api_key:
        yield "note      anyone who can reach this address can use the model; set --api-key to require a key"
