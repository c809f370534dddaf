"""Translation of each flag of `vllm serve`, read from `flags.toml`; docs/vllm.md has the same table."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from serving.config import DRAFTER_METHODS, ConfigError

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


def json_value(name: str, text: str) -> Any:
    """Returns the value of a flag in JSON.

    Raises:
        ConfigError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}): {text[:80]}") from None


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
    config = json_value("--speculative-config", value)
    if not isinstance(config, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got {value[:80]}")
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


def _read() -> Iterator[Flag]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for described, ours in table["renamed"].items():
        values = table["values"].get(described.split()[0], {})
        yield Flag.of(described, ours=ours, becomes=partial(_renamed, ours, values))
    ours = ", ".join(("--speculative-method", "--speculative-model", *_DRAFT_KEYS.values()))
    yield Flag.of("--speculative-config -sc VALUE", ours=ours, becomes=_drafts)
    yield Flag.of(
        "--generation-config VALUE",
        ours="--generation-config, --no-generation-config",
        becomes=_generation_config,
        only_before=("auto", "vllm"),
    )
    for described in table["repeated"]["flags"]:
        name = described.split()[0]
        yield Flag.of(described, ours=f"`{name}` for each value", becomes=partial(_each, name))
    for described, (on, off) in table["switches"].items():
        yield Flag.of(described, ours=on, becomes=lambda _, on=on: [on], off=(off,))
    for field, section in (("unnecessary", "no_effect"), ("missing", "unsupported")):
        yield from (Flag.of(each, **{field: why}) for why, flags in table[section].items() for each in flags)


FLAGS: tuple[Flag, ...] = tuple(_read())
"""All flags, in the order of docs/vllm.md."""
