"""Programs of a few of a model's layers, and the figures of the whole model that follow from them.

One cut has one layer of each kind, and for each kind there is a cut with one more of it. What that one adds is taken
for what every further layer of its kind adds. Compiling takes a time that depends on the kinds, not on the layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from mamba_jax.config import SHARED, HybridConfig
from serving.capacity.compiling import Program

T = TypeVar("T")
Cut = tuple[int, ...]
"""Places of layers in the model's pattern."""


def can_cut(config: HybridConfig) -> bool:
    """Whether layers of one kind are alike, and cuts of them are shorter than the model."""
    alike = SHARED not in config.pattern and not config.norm_after
    alike &= config.mlp is None or isinstance(config.mlp.intermediate_size, int)
    return alike and sum(map(len, layer_cuts(config))) < len(config.pattern)


def layer_cuts(config: HybridConfig) -> list[Cut]:
    """Returns the cut with one layer of each kind, then for each kind with several layers that with one more of it."""
    places = {kind: [i for i, each in enumerate(config.pattern) if each == kind] for kind in config.pattern}
    base = [several[0] for several in places.values()]
    return [tuple(base), *(tuple(sorted([*base, each[1]])) for each in places.values() if len(each) > 1)]


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


def whole_programs(config: HybridConfig, compiled: Sequence[Sequence[Program]]) -> list[Program]:
    """Returns the programs of the whole model.

    Args:
        compiled: the programs of each cut, in the order of `layer_cuts`.
    """
    base, *more = layer_cuts(config)
    kinds = [(set(cut) - set(base)).pop() for cut in more]
    extra = [config.pattern.count(config.pattern[place]) - 1 for place in kinds]
    return [_whole(programs[0], programs[1:], extra) for programs in zip(*compiled, strict=True)]


def _whole(base: Program, longer: Sequence[Program], extra: Sequence[int]) -> Program:
    def scaled(first: int, others: Iterable[int]) -> int:
        return first + sum(count * (other - first) for count, other in zip(extra, others, strict=True))

    def counts(first: dict[str, int], others: Sequence[dict[str, int]]) -> dict[str, int]:
        keys = dict.fromkeys(key for each in (first, *others) for key in each)
        found = {key: scaled(first.get(key, 0), (each.get(key, 0) for each in others)) for key in keys}
        return {key: count for key, count in found.items() if count > 0}

    return dataclasses.replace(
        base,
        code=scaled(base.code, (each.code for each in longer)),
        # Layers run one after the other, and use the same memory.
        temporaries=max(each.temporaries for each in (base, *longer)),
        aliased=scaled(base.aliased, (each.aliased for each in longer)),
        moved=scaled(base.moved, (each.moved for each in longer)),
        weights=scaled(base.weights, (each.weights for each in longer)),
        collectives=counts(base.collectives, [each.collectives for each in longer]),
        launches=counts(base.launches, [each.launches for each in longer]),
        kernels=scaled(base.kernels, (each.kernels for each in longer)),
        seconds=sum(each.seconds for each in (base, *longer)),
    )
