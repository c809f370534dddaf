"""Random values that make a model behave like a trained one in kind: stable, and not degenerate.

The recurrence starts as the published Mamba-2 code starts it (dt log-uniform in [0.002, 0.1], A uniform in [1, 16]);
matrices are normal with 1/sqrt(fan-in). Everything that usually starts at one or zero (norms, D, biases) is disturbed,
because a model in which these do nothing would hide their errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

Draw = Callable[[tuple[int, ...]], np.ndarray]

_DT_RANGE = (0.002, 0.1)
_A_RANGE = (1.0, 16.0)
# name (its last parts) -> mean and standard deviation
_DISTURBED: tuple[tuple[str, float, float], ...] = (
    (r"(^|\.)[Dd]$", 1.0, 0.1),
    (r"e_score_correction_bias$|correction_bias$", 0.0, 0.1),
    (r"norm[^.]*(\.weight|\.scale)?$", 1.0, 0.1),
    (r"conv[^.]*\.weight$", 0.0, 0.3),
    (r"bias$", 0.0, 0.02),
)


def initial_values(name: str, shape: tuple[int, ...], normal: Draw, uniform: Draw, tied: bool = False) -> np.ndarray:
    """Values for one tensor, chosen by its name (ours or Hugging Face's).

    Args:
        name: dotted; the last parts decide.
        shape: of the result.
        normal: draws standard normals of a shape.
        uniform: draws uniforms in [0, 1).
        tied: the embedding is the output head too, so it is scaled as a head.
    """
    if name.endswith("dt_bias"):
        low, high = map(math.log, _DT_RANGE)
        dt = np.exp(low + (high - low) * uniform(shape))
        return dt + np.log(-np.expm1(-dt))  # the inverse of softplus
    if name.lower().endswith("a_log"):
        low, high = _A_RANGE
        return np.log(low + (high - low) * uniform(shape))
    if re.search(r"embed[^.]*(\.weight|\.embedding)?$", name):
        return normal(shape) * (1 / math.sqrt(shape[-1]) if tied else 1.0)
    for pattern, mean, deviation in _DISTURBED:
        if re.search(pattern, name):
            return mean + deviation * normal(shape)
    return normal(shape) / math.sqrt(shape[-1])
