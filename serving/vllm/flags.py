"""Translates a command line of `vllm serve`, or keywords of vLLM's `LLM(...)`, to this project's.

`flags.toml` has the translation of each flag; docs/vllm.md has the same table.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from serving.config import DRAFTER_METHODS, ConfigError, EngineConfig
from serving.settings import json_object, json_value

Words = list[str]


@dataclass(frozen=True)
class Flag:
    """One flag of vLLM. Exactly one of `becomes`, `unnecessary` and `missing` is set."""

    name: str
    takes: Literal["", "VALUE", "VALUES"]
    """Number of values."""
    short: tuple[str, ...] = ()
    ours: str = ""
    """This project's flags, for the table."""
    becomes: Callable[[str], Words] | None = None
    """Returns this project's flags for a value ("" if the flag has no value)."""
    off: tuple[str, ...] = ()
    """This project's flags for `--no-...`."""
    unnecessary: str = ""
    """Why the flag has no effect."""
    missing: str = ""
    """The unsupported feature, and the alternative."""
    harmless: tuple[str, ...] = ()
    """Values of a missing flag that have the same effect as its absence."""
    only_before: tuple[str, ...] = ()
    """This project's flag has no value; the flag is vLLM's only if one of these words follows."""

    @classmethod
    def of(cls, described: str, **fields: Any) -> Flag:
        """The flag that is written as `--swap-space VALUE`, `--enforce-eager` or `--runner auto|generate`."""
        name, *words = described.split()
        short = tuple(word for word in words if word.startswith("-"))
        value = "".join(word for word in words if not word.startswith("-"))
        if value not in ("", "VALUE", "VALUES"):
            return cls(name, "VALUE", short, harmless=tuple(value.split("|")), **fields)
        return cls(name, value, short, **fields)  # type: ignore[arg-type]


_MTP = ("mtp", "nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp")
_UNNECESSARY_FOR_DRAFTS = (
    "moe_backend", "attention_backend", "draft_tensor_parallel_size", "enforce_eager", "draft_sample_method",
    "rejection_sample_method",
)  # fmt: skip
"""Keys about kernels, and about how drafts are drawn: they are always the most likely tokens."""
_DRAFT_KEYS = {
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_min": "--prompt-lookup-min",
    "prompt_lookup_max": "--prompt-lookup-max",
}


def _drafts(value: str) -> Words:
    """Translates `--speculative-config`, a JSON object."""
    config = json_object("--speculative-config", value)
    method = config.pop("method", None)
    if method not in (None, "ngram", *_MTP, *DRAFTER_METHODS):
        raise ConfigError(
            f"--speculative-config: method {method!r} is not supported; drafts come from the model's own layer (mtp), "
            f"ngram, or a drafter ({', '.join(DRAFTER_METHODS)})"
        )
    words = [] if method is None else ["--speculative-method", "mtp" if method in _MTP else method]
    if method not in _MTP and "model" in config:
        words += ["--speculative-model", str(config.pop("model"))]
    for key, number in config.items():
        if key in _UNNECESSARY_FOR_DRAFTS:
            continue
        if key not in _DRAFT_KEYS:
            known = ", ".join(["method", *_DRAFT_KEYS])
            raise ConfigError(f"--speculative-config: unknown key {key!r}; allowed: {known}")
        words += [_DRAFT_KEYS[key], str(number)]
    return words


def _generation_config(value: str) -> Words:
    match value:
        case "auto":
            return ["--generation-config"]
        case "vllm":
            return ["--no-generation-config"]
    raise ConfigError("--generation-config must be auto (the checkpoint's) or vllm (none); folders are not supported")


_UNSUPPORTED_FAMILIES = {"inkling": "Inkling", "kimi_k3": "Kimi K3"}
"""Unsupported families by the names of their parsers."""


def _renamed(ours: str, values: dict[str, str], value: str) -> Words:
    if ours.endswith("-parser"):
        value = value.lower()
        if family := _UNSUPPORTED_FAMILIES.get(value):
            raise ConfigError(f"{ours} {value}: {family} models are not supported; README.md lists all families")
    known = values.get(value.lower(), value)
    return [ours, known] if known or not value else []


def _each(name: str, value: str) -> Words:
    items = json_value(name, value) if value.lstrip().startswith("[") else [value]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} must be a JSON list of strings, got {value}")
    return [word for item in items for word in (name, item)]


def _table() -> Iterator[Flag]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for described, ours in table["renamed"].items():
        values = table["values"].get(described.split()[0], {})
        yield Flag.of(described, ours=ours, becomes=partial(_renamed, ours, values))
    ours = ", ".join(("--speculative-method", "--speculative-model", *_DRAFT_KEYS.values()))
    yield Flag.of("--speculative-config -sc VALUE", ours=ours, becomes=_drafts)
    ours = "--generation-config, --no-generation-config"
    only = ("auto", "vllm")
    yield Flag.of("--generation-config VALUE", ours=ours, becomes=_generation_config, only_before=only)
    for described in table["repeated"]["flags"]:
        name = described.split()[0]
        yield Flag.of(described, ours=f"`{name}` for each value", becomes=partial(_each, name))
    for described, (on, off) in table["switches"].items():
        yield Flag.of(described, ours=on, becomes=lambda _, on=on: [on], off=(off,))
    for name, section in (("unnecessary", "no_effect"), ("missing", "unsupported")):
        yield from (Flag.of(each, **{name: why}) for why, flags in table[section].items() for each in flags)


FLAGS: tuple[Flag, ...] = tuple(_table())
"""All flags, in the order of docs/vllm.md."""


@dataclass
class Translated:
    """A command line for `mamba-jax`, and notices about it."""

    words: Words = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


_NAMED = {name: flag for flag in FLAGS for name in (flag.name, *flag.short)}
_SPELLINGS = {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields}
_OPPOSITES = {f"--no-{flag.name[2:]}": flag for flag in FLAGS if not flag.takes}


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
        values = [value] if equals else []
        if flag.takes and not equals:
            if not waiting:
                raise ConfigError(f"{flag.name} needs a value")
            values.append(waiting.pop(0))
            while flag.takes == "VALUES" and waiting and not waiting[0].startswith("-"):
                values.append(waiting.pop(0))
        if flag.unnecessary:
            done.notices.append(f"{' '.join([name, *values])}: has no effect: {flag.unnecessary}")
        elif flag.missing:
            if name not in _OPPOSITES and not (values and set(values) <= set(flag.harmless)):
                raise ConfigError(f"{name} is not supported: {flag.missing}")
        elif name in _OPPOSITES:
            done.words += flag.off
        elif flag.becomes is not None:
            for value in values or [""]:
                done.words += flag.becomes(value)
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
    return [f"{dashed}={value if isinstance(value, (str, int, float)) else json.dumps(value, default=str)}"]


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
        if same or value is None or f"--{name.replace('_', '-')}" not in _NAMED | _OPPOSITES:
            flags[name] = value
            continue
        done = translate(words_of(name, value), _SPELLINGS)
        notices += done.notices
        flags |= _read(name, done.words)
    return flags, notices


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
        nested[_dashed(flag)][key] = value
        with contextlib.suppress(ValueError, RecursionError):
            nested[_dashed(flag)][key] = json.loads(value)
    return [*left, *(word for flag, table in nested.items() for word in (flag, json.dumps(table)))]


def _read(keyword: str, words: list[str]) -> dict[str, Any]:
    """Converts a command line to flags of the engine. Numbers remain strings, which the configuration parses."""
    flags: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word, equals, value = waiting.pop(0).partition("=")
        name = word.removeprefix("--").replace("-", "_")
        positive = name if name in EngineConfig.model_fields else name.removeprefix("no_")
        if positive not in EngineConfig.model_fields:
            raise ConfigError(f"{keyword} is an option of `mamba-jax serve` ({word}), not of the engine")
        if EngineConfig.model_fields[positive].annotation is bool:
            flags[positive] = name == positive
        elif not equals and not waiting:
            raise ConfigError(f"{keyword} needs a value")
        else:
            flags[name] = value if equals else waiting.pop(0)
    return flags
