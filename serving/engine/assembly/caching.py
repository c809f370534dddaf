"""Resolves the flags of caching, which depend on each other."""

from __future__ import annotations

from typing import NamedTuple

from serving.config import CacheMode, EngineConfig


class ResolvedCaching(NamedTuple):
    """The cache mode and chunking that result from the flags, with notices for the user."""

    mode: CacheMode
    chunked_prefill: bool
    notices: tuple[str, ...]


def resolve_caching(config: EngineConfig) -> ResolvedCaching:
    """Resolves conflicts between prefix caching, cache mode and chunked prefill.

    | prefix caching | mode given   | mode used                                                |
    |----------------|--------------|----------------------------------------------------------|
    | on             | unset, all   | all                                                      |
    | on             | none         | none                                                     |
    | on             | align        | align; chunked prefill is switched on, with a notice     |
    | off            | unset, none  | none                                                     |
    | off            | align, all   | none, with a notice                                      |

    Every mode works with and without drafts.
    """
    asked, chunked = config.mamba_cache_mode, config.enable_chunked_prefill
    if config.narrows_states and not chunked:
        found = resolve_caching(config.model_copy(update={"enable_chunked_prefill": True}))
        notice = "chunked prefill is switched on: checkpoint_dtype needs it"
        return found._replace(notices=(*found.notices, notice))
    if not config.enable_prefix_caching:
        if asked in ("align", "all"):
            return ResolvedCaching(
                "none", chunked, (f"mamba_cache_mode {asked!r} has no effect: prefix caching is switched off",)
            )
        return ResolvedCaching("none", chunked, ())
    mode: CacheMode = asked or "all"
    if mode == "align" and not chunked:
        return ResolvedCaching(mode, True, ("chunked prefill is switched on: mamba_cache_mode 'align' needs it",))
    return ResolvedCaching(mode, chunked, ())
