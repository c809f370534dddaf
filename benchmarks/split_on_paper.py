"""Estimate the cost of a split: bytes of one request by model and length, and the time to transfer them.

    python -m benchmarks.split_on_paper

prints the tables of docs/split.md. Nothing here is measured.
"""

from __future__ import annotations

import jax.numpy as jnp

from checkpoints.presets import PRESETS, preset
from mamba_jax.store import StoreShape

MODELS = ("nemotron-h-8b", "nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b", "granite-4.0-h-small", "falcon-h1-7b",
          "mamba2-2.7b")  # fmt: skip
LENGTHS = (2_048, 8_192, 32_768, 131_072)
LINKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}


def point_bytes(model: str, tokens: int) -> tuple[int, int]:
    """Bytes of a state, and of the keys and values of `tokens` tokens; SSM states in float32, all else in bfloat16."""
    shape = StoreShape.of(preset(model))
    return shape.bytes_per_slot(jnp.bfloat16), shape.bytes_per_page(1, jnp.bfloat16) * tokens


def table() -> list[str]:
    """Rows of Markdown: model, state, KV bytes a token, then all bytes at each length."""
    heads = ["model", "state", "KV a token", *(f"{length:,} tokens" for length in LENGTHS)]
    rows = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for model in MODELS:
        state, per_token = point_bytes(model, 1)
        sizes = [_said(state + per_token * length) for length in LENGTHS]
        rows.append(" | ".join([model, _said(state), _said(per_token), *sizes]))
    return [f"| {row} |" for row in rows]


def times() -> list[str]:
    """Rows of Markdown: time on a link at each length, and for computing it at 200 TFLOP/s in use."""
    heads = ["model", "", *(f"{length:,} tokens" for length in LENGTHS)]
    rows = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for model in MODELS:
        for name, speed in LINKS.items():
            found = [f"{sum(point_bytes(model, length)) / speed * 1e3:.1f} ms" for length in LENGTHS]
            rows.append(" | ".join([model, f"sent at {name}", *found]))
        found = [f"{prefill_operations(model, length) / 200e12 * 1e3:.0f} ms" for length in LENGTHS]
        rows.append(" | ".join([model, "computed at 200 TFLOP/s", *found]))
    return [f"| {row} |" for row in rows]


def prefill_operations(model: str, tokens: int) -> float:
    """Floating-point operations of a prompt: a product with each weight, and causal attention: its part is quadratic.

    Scores and their product with the values take 2 operations each for half of all pairs, in each head and dimension.
    """
    config = preset(model)
    layers = sum(kind in "*P" for kind in config.pattern)
    width = config.attention.num_heads * config.attention.head_dim if config.attention is not None else 0
    return 2 * active_parameters(model) * tokens + 2 * layers * width * float(tokens) ** 2


def active_parameters(model: str) -> float:
    """Parameters that one token is multiplied with."""
    name = model.rsplit("-a", 1)
    if len(name) == 2 and name[1].endswith("b"):
        return float(name[1][:-1]) * 1e9
    return _ACTIVE.get(model, PRESETS[model].parameters)


_ACTIVE = {"granite-4.0-h-small": 9e9}


def _said(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


if __name__ == "__main__":
    print("\n".join([*table(), "", *times()]))
