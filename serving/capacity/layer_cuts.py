"""Figures of a whole model from programs of a few of its layers, since compiling every layer takes minutes.

One cut has one layer of each kind; further cuts have three more layers of one kind. What these add, on average, is
taken for what each further layer of their kind adds. Sampling, most of what is compiled, is compiled once: in one of
the programs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from mamba_jax.config import SHARED, HybridConfig
from serving.capacity.compiling import Program

T = TypeVar("T")
_MORE = 3
"""Compilers share code between layers: a second layer alone may add as much as the next ten."""
Cut = tuple[int, ...]
"""Places of layers in the model's pattern."""


def layer_cuts(config: HybridConfig) -> list[Cut]:
    """Returns the cuts to compile; one of all layers if layers of one kind differ, or cuts would not be shorter."""
    places = {kind: [i for i, each in enumerate(config.pattern) if each == kind] for kind in config.pattern}
    base = [several[0] for several in places.values()]
    more = [each[1 : 1 + _MORE] for each in places.values() if len(each) > 1]
    cuts = [tuple(base), *(tuple(sorted([*base, *each])) for each in more)]
    differ = SHARED in config.pattern or config.norm_after or config.drafter is not None
    differ = differ or (config.mlp is not None and not isinstance(config.mlp.intermediate_size, int))
    return [tuple(range(len(config.pattern)))] if differ or sum(map(len, cuts)) >= len(config.pattern) else cuts


def cut_config(config: HybridConfig, cut: Cut) -> HybridConfig:
    """Returns the configuration of a model of these layers."""
    return dataclasses.replace(config, pattern="".join(config.pattern[i] for i in cut))


def cut_parameters(parameters: Mapping[str, T], cut: Cut) -> dict[str, T]:
    """Returns the parameters of these layers under their new places, and those outside of layers."""
    new = {old: place for place, old in enumerate(cut)}
    found: dict[str, T] = {}
    for path, leaf in parameters.items():
        if (block := re.match(r"blocks\.(\d+)\.", path)) is None:
            found[path] = leaf
        elif int(block[1]) in new:
            found[f"blocks.{new[int(block[1])]}.{path[block.end() :]}"] = leaf
    return found


def whole_program(config: HybridConfig, greedy: Sequence[Program], sampling: tuple[Program, Program]) -> Program:
    """Returns a program of the whole model.

    Args:
        config: the model.
        greedy: the program of each cut, without sampling.
        sampling: a program of the first cut, with and without sampling.
    """
    first, *longer = greedy
    base, *cuts = layer_cuts(config)
    kinds = [config.pattern[(set(cut) - set(base)).pop()] for cut in cuts]
    # How often what a cut adds is added in the whole model.
    times = [(config.pattern.count(kind) - 1) / (len(cut) - len(base)) for kind, cut in zip(kinds, cuts, strict=True)]

    def scaled(field: str) -> int:
        one = getattr(first, field)
        return one + round(sum(n * (getattr(each, field) - one) for n, each in zip(times, longer, strict=True)))

    return dataclasses.replace(
        first,
        code=scaled("code") + sampling[0].code - sampling[1].code,
        aliased=scaled("aliased"),
        # Layers and sampling run one after the other, and use the same memory.
        temporaries=max(each.temporaries for each in (*greedy, sampling[0])),
        seconds=sum(each.seconds for each in greedy),
    )
