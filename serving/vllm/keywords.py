"""Translates keyword arguments of vLLM's `LLM(...)` with the same table as the flags of `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.config import ConfigError, EngineConfig
from serving.vllm.command import is_known, translate, words_of

_SPELLINGS = {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields}


def engine_flags(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the engine's flags for these keywords, and a notice for each one that has no effect.

    Keywords that are not vLLM's are returned unchanged; `EngineConfig.create` reports unknown ones.

    Raises:
        ConfigError: a keyword is not supported, or its value is invalid.
    """
    flags: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in keywords.items():
        same = name in EngineConfig.model_fields and not isinstance(value, str) and value != -1
        if same or value is None or not is_known(name):
            flags[name] = value
            continue
        done = translate(words_of(name, value), _SPELLINGS)
        notices += done.notices
        flags |= _read(name, done.words)
    return flags, notices


def _read(keyword: str, words: list[str]) -> dict[str, Any]:
    """Converts a command line to flags of the engine. Numbers remain strings, which the configuration parses."""
    flags: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word, equals, value = waiting.pop(0).partition("=")
        name = word.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if name not in EngineConfig.model_fields and positive not in EngineConfig.model_fields:
            raise ConfigError(f"{keyword} is an option of `mamba-jax serve` ({word}), not of the engine")
        if EngineConfig.model_fields[positive if name not in EngineConfig.model_fields else name].annotation is bool:
            flags[positive] = name == positive
        elif not equals and not waiting:
            raise ConfigError(f"{keyword} needs a value")
        else:
            flags[name] = value if equals else waiting.pop(0)
    return flags
