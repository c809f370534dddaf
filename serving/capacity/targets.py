"""Machines that can be planned for: names as cloud users write them, and published figures of one device.

`targets.toml` has the tables.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from serving.config import ConfigError
from serving.engine.assembly.free_memory import GIB

Platform = Literal["tpu", "gpu"]


@dataclass(frozen=True)
class Device:
    """Published figures of one device as JAX sees it (half a chip on TPU7x)."""

    name: str
    platform: Platform
    memory: int
    """Bytes that programs may use."""
    bandwidth: float
    """Of that memory, in bytes per second."""
    flops: float
    """Dense bfloat16 products, per second."""


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_ROWS: dict[str, dict[str, Any]] = _TABLES["tpu"] | _TABLES["gpu"]
DEVICES = {
    kind: Device(row["name"], platform, int(row["gib"] * GIB), row["gb_per_s"] * 1e9, row["tflops"] * 1e12)
    for platform in get_args(Platform)
    for kind, row in _TABLES[platform].items()
}
_SIZES = {
    kind: {int(size): shape for size, shape in _TABLES["sizes"][row["sizes"]].items()} for kind, row in _ROWS.items()
}
"""Machines by kind and size, smallest first, with the compiler's shape of each."""


@dataclass(frozen=True)
class Target:
    """A machine, or a slice of one."""

    name: str
    """As the user wrote it."""
    device: Device
    count: int
    """Devices as JAX sees them: the model is divided over all of them."""
    topology: str | None
    """The compiler's name, such as `v6e:2x4` or `h200:1x1x8` (slices, hosts, GPUs of each); None where nothing can be
    compiled. It may describe more devices than `count`."""


def target(name: str) -> Target:
    """The machine called `name`: a slice such as `v6e-8` or the compiler's `v6e:2x4`, or GPUs: `h100-8`, `8xH100`.

    Raises:
        ConfigError: there is none of this name; the message lists the known ones.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    for other, usual in _TABLES["other_names"].items():
        plain = plain.replace(other, usual)
    if (match := re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", plain)) and match[1] in _TABLES["tpu"]:
        chips = math.prod(map(int, match[2].split("x")))
        return Target(name, DEVICES[match[1]], chips * _per_chip(match[1], "devices"), plain)
    kind, count = _kind_and_count(plain)
    if (shape := _SIZES.get(kind, {}).get(count)) is None:
        # The smallest machine of this kind with at least so many devices, else its largest, else one of a similar name.
        sizes = list(_SIZES.get(kind, ()))
        larger = [f"{kind}-{size}" for size in sizes if size >= count] + [f"{kind}-{size}" for size in sizes[-1:]]
        near = larger[:1] or difflib.get_close_matches(plain, known(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = ", ".join(f"{kind}-{{{','.join(map(str, sizes))}}}" for kind, sizes in _SIZES.items())
        raise ConfigError(
            f"topology {name!r} is not known; {hint}known are {names}, and the compiler's own such as v6e:2x4"
        )
    count = count // _per_chip(kind, "cores") * _per_chip(kind, "devices")
    compiles = DEVICES[kind].platform == "tpu" or kind in _TABLES["compiled"]
    return Target(name, DEVICES[kind], count, f"{kind}:{shape}" if compiles else None)


def _kind_and_count(plain: str) -> tuple[str, int]:
    """Returns kind and size of `h100-4`, `4xh100`, `h100x4`, `h100:4` or `h100`."""
    if match := re.fullmatch(r"(\d+)-?[x*]-?(.+)", plain):
        return match[2], int(match[1]) * _per_chip(match[2], "cores")
    if match := re.fullmatch(rf"({'|'.join(_SIZES)})(?:-|-?[x*:]-?)(\d+)", plain):
        return match[1], int(match[2])
    return plain, 1


def known() -> list[str]:
    """Every name of a machine."""
    return [f"{kind}-{size}" for kind, sizes in _SIZES.items() for size in sizes]


def families() -> list[list[Target]]:
    """All machines by kind of device, smallest first."""
    return [[target(f"{kind}-{size}") for size in sizes] for kind, sizes in _SIZES.items()]


def larger(of: Target) -> list[Target]:
    """Machines of the same kind with more devices, smallest first."""
    return [each for family in families() for each in family if each.device is of.device and each.count > of.count]


def _per_chip(kind: str, what: Literal["cores", "devices"]) -> int:
    return int(_ROWS.get(kind, {}).get(f"{what}_per_chip", 1))


def gpu_description(kind: str) -> str:
    """The description of the GPU called `kind`, one of those that programs can be compiled for."""
    described: str = _TABLES["description"]["text"]
    return described % {**_TABLES["compiled"][kind], "bandwidth": DEVICES[kind].bandwidth}
