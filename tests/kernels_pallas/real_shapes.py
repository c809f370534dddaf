"""Calls at the sizes of real models, as shapes only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32


@dataclasses.dataclass(frozen=True)
class Model:
    """One Mamba and one attention layer."""

    name: str
    heads: int
    head_dim: int
    groups: int
    state: int
    q_heads: int
    kv_heads: int

    def divided(self, devices: int) -> "Model":
        """What one of several devices has: some heads, and the groups and keys that they need."""
        return dataclasses.replace(
            self,
            name=f"{self.name}/{devices}",
            heads=self.heads // devices,
            groups=max(1, self.groups // devices),
            q_heads=self.q_heads // devices,
            kv_heads=max(1, self.kv_heads // devices),
        )


MODELS = (
    Model("nemotron-h-8b", heads=128, head_dim=64, groups=8, state=128, q_heads=32, kv_heads=8),
    Model("nemotron-3-nano", heads=64, head_dim=64, groups=8, state=128, q_heads=32, kv_heads=2),
    Model("bamba-9b", heads=128, head_dim=64, groups=1, state=128, q_heads=32, kv_heads=8),
    Model("granite-4.0-h-small", heads=128, head_dim=64, groups=1, state=128, q_heads=32, kv_heads=8),
)
# Lightning attention has a group for each head.
LIGHTNING = Model("minimax-text-01", heads=64, head_dim=128, groups=64, state=128, q_heads=64, kv_heads=8)
OTHERS = (
    Model("nemotron-nano-9b-v2", heads=128, head_dim=80, groups=8, state=128, q_heads=40, kv_heads=8),
    Model("nemotron-h-47b", heads=256, head_dim=64, groups=8, state=256, q_heads=64, kv_heads=8),
    Model("granite-4.0-h-tiny", heads=48, head_dim=64, groups=1, state=128, q_heads=12, kv_heads=4),
    LIGHTNING,
)


def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
    """An array of this shape."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def update_call(model: Model, rows: int, steps: int, *, slots: int | None = None, dtype=BF16, store=F32):
    """Arguments of `state_update`, the store seventh, then read and write slots."""
    heads, inner = (rows, steps, model.heads), (rows, steps, model.groups, model.state)
    slots = slots or rows * (steps + 1) + 1
    return (
        shape(*heads, model.head_dim, dtype=dtype),
        shape(*heads),
        shape(model.heads),
        shape(*inner, dtype=dtype),
        shape(*inner, dtype=dtype),
        shape(model.heads),
        shape(slots, model.heads, model.head_dim, model.state, dtype=store),
        shape(rows, dtype=I32),
        shape(rows, steps, dtype=I32),
    )


def replay_call(model: Model, rows: int, steps: int, interval: int, *, slots: int | None = None, dtype=BF16, store=F32):
    """Arguments of `state_replay`: states, the tail's arrays, x, dt, a, b, c, d, then six arrays by row."""
    entries = 1 << (interval + steps - 2).bit_length()
    x, dt, a, b, c, d, states, *_ = update_call(
        model, rows, steps, slots=slots or 2 * rows + 1, dtype=dtype, store=store
    )
    ring = (rows + 1, entries)
    tail = (
        shape(*ring, model.heads * model.head_dim, dtype=dtype),
        shape(*ring, model.groups * model.state, dtype=dtype),
        shape(*ring, model.heads),
    )
    return states, *tail, x, dt, a, b, c, d, *(shape(rows, dtype=I32) for _ in range(6))


def scan_call(model: Model, tiles: int, *, tile_size: int = 128, slots: int = 64, dtype=BF16, store=F32):
    """Arguments of `ssd_scan`, the store seventh, then tile_first, read and write slots."""
    tokens, inner = (tiles, tile_size), (model.groups, model.state)
    return (
        shape(*tokens, model.heads, model.head_dim, dtype=dtype),
        shape(*tokens, model.heads),
        shape(model.heads),
        shape(*tokens, *inner, dtype=dtype),
        shape(*tokens, *inner, dtype=dtype),
        shape(model.heads),
        shape(slots, model.heads, model.head_dim, model.state, dtype=store),
        shape(tiles, dtype=jnp.bool_),
        shape(tiles, dtype=I32),
        shape(tiles, dtype=I32),
    )


def gated_scan_call(model: Model, tiles: int, *, rows: int = 2, tile_size: int = 128, slots: int = 64, width: int = 4):
    """Arguments of `gated_scan`, states and windows tenth and eleventh, then its places."""
    inner, index = model.heads * model.head_dim, functools.partial(shape, dtype=I32)
    tokens = max(tiles - rows, 1) * tile_size
    _, _, a, *_, store, _, _, _ = scan_call(model, tiles, slots=slots)
    of_groups = shape(tokens, model.groups, model.state, dtype=BF16)
    weights = shape(inner, width, dtype=BF16), shape(inner, dtype=BF16), shape(inner, dtype=BF16)
    places = {
        **{name: index(tokens) for name in ("token_row", "token_in_tiles")},
        **{name: index(rows) for name in ("row_start", "read_slot")},
        **{name: index(tiles) for name in ("tile_row", "tile_end", "tile_read_slot", "tile_write_slot")},
        "tile_first": shape(tiles, dtype=jnp.bool_),
        "tile_tokens": index(tiles, tile_size),
        "tile_valid": shape(tiles, tile_size, dtype=jnp.bool_),
    }
    zx, dt = shape(tokens, 2, inner, dtype=BF16), shape(tokens, model.heads)
    return zx, dt, a, of_groups, of_groups, a, *weights, store, shape(slots, width - 1, inner, dtype=BF16), places


def gated_update_call(model: Model, rows: int, steps: int, *, width: int = 4):
    """Arguments of `gated_update`, the three stores from the twelfth on, then its places."""
    inner, channels, lead = model.heads * model.head_dim, 2 * model.groups * model.state, (rows, steps)
    slots = rows * (steps + 1) + 1
    bf16 = functools.partial(shape, dtype=BF16)
    return (
        bf16(*lead, 2, inner),
        bf16(*lead, 2, model.groups, model.state),
        shape(*lead, model.heads),
        *[shape(model.heads)] * 3,
        bf16(inner, width),
        bf16(inner),
        bf16(channels, width),
        bf16(channels),
        bf16(inner),
        shape(slots, model.heads, model.head_dim, model.state),
        bf16(slots, width - 1, inner),
        bf16(slots, width - 1, channels),
        slots_of_steps(rows, steps),
    )


def gated_replay_call(inputs, store, windows, tail, rows: int, steps: int):
    """Arguments of `gated_replay` or `gated_delta_replay`: inputs, seven stores, then the places."""
    rings = [shape(rows + 1, 1 << (one.shape[1] + steps - 2).bit_length(), one.shape[2], dtype=BF16) for one in windows]
    names = ("anchor_slot", "tail_id", "anchor_length", "length", "num_tokens", "write_slot")
    places = {name: shape(rows, dtype=I32) for name in names}
    return *inputs, store, *tail, *(one for pair in zip(windows, rings, strict=True) for one in pair), places


def slots_of_steps(rows: int, steps: int):
    """The places of `gated_update` and `gated_delta_update`."""
    index = functools.partial(shape, dtype=I32)
    return {"valid": shape(rows, steps, dtype=jnp.bool_), "read_slot": index(rows), "write_slot": index(rows, steps)}


def attention_call(model: Model, blocks: int, q_len: int, *, page_size: int = 64, pages_per_row: int = 128, dtype=BF16):
    """Arguments of `paged_attention`, heads of 128: q, kv, positions, page_table, block_row."""
    rows = blocks if q_len < 16 else max(1, blocks // 4)
    return (
        shape(blocks, q_len, model.q_heads, 128, dtype=dtype),
        shape(1 + rows * pages_per_row // 4, page_size, 2 * model.kv_heads, 128, dtype=dtype),
        shape(blocks, q_len, dtype=I32),
        shape(rows, pages_per_row, dtype=I32),
        shape(blocks, dtype=I32),
    )


def nbytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of this shape."""
    return array.size * array.dtype.itemsize
