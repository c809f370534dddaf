"""Translates a command line of `vllm serve`, or keywords of vLLM's `LLM(...)`, to this project's."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.config import ConfigError, EngineConfig
from serving.vllm.flags import FLAGS, Flag, Words


@dataclass
class Translated:
    """A command line for `mamba-jax`, and notices about it."""

    words: Words = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


_NAMED = {name: flag for flag in FLAGS for name in (flag.name, *flag.short)}
_SPELLINGS = {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields}
_OPPOSITES = {f"--no-{flag.name[2:]}": flag for flag in FLAGS if not flag.takes}


def is_known(name: str) -> bool:
    """Returns whether a keyword such as `gpu_memory_utilization` is in the table of vLLM's flags."""
    return f"--{name.replace('_', '-')}" in _NAMED | _OPPOSITES


def translate(words: Sequence[str], own: Collection[str] = ()) -> Translated:
    """Replaces vLLM's flags by this project's; all other words are unchanged.

    Args:
        words: the command line after `serve`.
        own: options of this project's command, which take precedence over flags listed as unnecessary or missing.
    Raises:
        ConfigError: a flag is not supported, or its value is invalid.
    """
    done = Translated()
    waiting = _with_nested_values_joined(words, own)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            done.words += [word, *waiting]
            break
        if re.fullmatch(r"-O\d", name):  # the only flag without a space before its value
            name, equals, value = "-O", "=", name[2:]
        name = _dashed(name)
        flag = _NAMED.get(name) or _OPPOSITES.get(name)
        ours = flag is not None and (
            (flag.becomes is None and flag.name in own)
            or (bool(flag.only_before) and not equals and (waiting[:1] or [""])[0] not in flag.only_before)
        )
        if flag is None or ours:
            done.words.append(name + equals + value)
            continue
        values = [value] if equals else _values(flag, waiting)
        _apply(flag, name, values, done)
    return done


def words_of(name: str, value: object) -> Words:
    """Converts an entry of a configuration file, or a keyword, to a command line: `tp_size: 2` gives `--tp-size=2`.

    True gives the flag, False its opposite `--no-...`, a list repeats the flag, None gives no words.
    """
    dashed = "--" + str(name).replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [dashed if value else f"--no-{dashed[2:]}"]
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (list, tuple, dict)) for item in value):
        return [f"{dashed}={item}" for item in value]
    return [f"{dashed}={value if isinstance(value, (str, int, float)) else json.dumps(value)}"]


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


def _apply(flag: Flag, name: str, values: Words, done: Translated) -> None:
    if flag.unnecessary:
        done.notices.append(f"{' '.join([name, *values])}: has no effect: {flag.unnecessary}")
    elif flag.missing:
        if name in _OPPOSITES or (values and set(values) <= set(flag.harmless)):
            return
        raise ConfigError(f"{name} is not supported: {flag.missing}")
    elif name in _OPPOSITES:
        done.words += flag.off
    elif flag.becomes is not None:
        for value in values or [""]:
            done.words += flag.becomes(value)


def _values(flag: Flag, waiting: Words) -> Words:
    """Removes a flag's values from the words after it, and returns them."""
    if not flag.takes:
        return []
    if not waiting:
        raise ConfigError(f"{flag.name} needs a value")
    values = [waiting.pop(0)]
    while flag.takes == "VALUES" and waiting and not waiting[0].startswith("-"):
        values.append(waiting.pop(0))
    return values


def _dashed(name: str) -> str:
    """Returns the flag with hyphens: vLLM also accepts underscores."""
    return name.replace("_", "-") if name.startswith("--") else name


def _with_nested_values_joined(words: Sequence[str], own: Collection[str]) -> Words:
    """Joins flags such as `--speculative-config.method mtp` to one flag with a JSON object."""
    left: Words = []
    nested: dict[str, dict[str, object]] = defaultdict(dict)
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        flag, dot, key = name.partition(".")
        if not (dot and flag.startswith("--") and (_dashed(flag) in _NAMED or _dashed(flag) in own)):
            left.append(word)
            continue
        if not equals:
            if not waiting:
                raise ConfigError(f"{name} needs a value")
            value = waiting.pop(0)
        nested[_dashed(flag)][key] = _plain(value)
    return [*left, *(word for flag, table in nested.items() for word in (flag, json.dumps(table)))]


def _plain(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


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
