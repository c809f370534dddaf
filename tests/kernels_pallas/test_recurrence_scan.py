"""The scans of recurrences against their definitions, and what holds for any implementation of them.

That compilers take the kernels is for test_tpu_compile.py and test_gpu_compile.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrence_cases as shared
from jax import lax
from model_calls import F32, call_of, program
from model_shapes import SELECTIVE
from operation_checks import DTYPES, ELSEWHERE, Draw, assert_close, assert_same_bits, assert_same_gradients, on_device

from kernels_pallas.places import Tiles
from kernels_pallas.recurrence import recurrence_sequence

pytestmark = pytest.mark.full

TOLERANCE = 5e-5
ALL = "native", "xla", ELSEWHERE, *shared.KERNELS
scanned = functools.partial(shared.program, "scan")
check = functools.partial(shared.check_call, "scan", tolerance=TOLERANCE)


PAIRS = [1, 0] * 3 + [1], [1, 0, 3, 0, 1, 0, 5], [0, 2, 0, 4, 0, 6, 7]
"""Rows of two tiles, and one of one, as many as `ragged` has: for the same program."""


def tiles_of(first, read, write):
    return Tiles(np.array(first, bool), np.array(read, np.int32), np.array(write, np.int32))


def ragged(shape, dtype=np.float32):
    """A continued row of three tiles (the last one short), a fresh row of one, a tile of NaN as padding, which writes
    the slot that it reads, a continued row that does so, too, and one that reads the first row's.
    """
    draw = Draw()
    tokens, store = shared.entry(draw, shape, 7, shape.tile_size, dtype=dtype), shared.states(draw, shape, 9, dtype)
    shared.pad(tokens, 2, shape.tile_size // 2 + 1)
    shared.pad(tokens, 4, 0)
    return tokens, store, tiles_of([1, 0, 0, 1, 1, 1, 1], [3, 0, 0, 0, 6, 5, 3], [0, 7, 1, 2, 6, 5, 8])


@DTYPES
@shared.cases(*ALL)
def test_equals_definition(implementation, shape, dtype):
    if implementation == "native" and dtype != np.float32:
        pytest.skip("states of 16 bits would be rounded after each token")
    tokens, store, tiles = ragged(shape, dtype)
    check(scanned(implementation, shape), shape, tokens, store, tiles, dtype=dtype)
    # A first tile that continues nothing starts from zeros.
    tiles = dataclasses.replace(tiles, first=tiles.first & (np.arange(7) > 0))
    check(scanned(implementation, shape), shape, tokens, store, tiles, dtype=dtype)


@shared.sizes(*ALL, whole=ALL)
def test_sizes(implementation, shape):
    check(scanned(implementation, shape), shape, *ragged(shape))


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", shared.KERNELS)
@pytest.mark.parametrize("shape", shared.ODD[:3], ids=lambda s: s.name)
def test_tiles_of_several_blocks(implementation, shape):
    shape = dataclasses.replace(shape, heads=4, groups=2, head_dim=16, state=32, tile_size=128)
    check(scanned(implementation, shape), shape, *ragged(shape))


@shared.cases(*ALL, shapes=shared.ODD[:4])
def test_equal_keys(implementation, shape):
    # What a row says again and again: a power series of the system would have terms beyond any precision.
    draw = Draw()
    tokens, store = shared.entry(draw, shape, 7, shape.tile_size), shared.states(draw, shape, 9)
    tokens.key[:], tokens.log_decay[:], tokens.strength[:] = tokens.key[0, 0], -1e-3, 1.0
    check(scanned(implementation, shape), shape, tokens, store, tiles_of(*PAIRS))


@shared.cases(*ALL, shapes=shared.ODD[:4])
def test_decays_of_any_strength(implementation, shape):
    # One token forgets all, the next nothing: a difference of sums would have lost the digits of the small decays, and
    # the inverse of a strong one overflows.
    draw = Draw()
    tokens, store = shared.entry(draw, shape, 7, shape.tile_size), shared.states(draw, shape, 9)
    strength = [1e-4, 1e-2, 1.0, 30.0, 3000.0]
    tokens.log_decay[:] *= draw.random.choice(strength, tokens.log_decay.shape, p=[0.4, 0.3, 0.2, 0.05, 0.05])
    # Decays of heads, and the GPU kernels' of channels, are differences of sums from a block's start.
    exact = shape.by_channel and implementation != "pallas_gpu_interpreted"
    call = tokens, store, tiles_of(*PAIRS)
    check(scanned(implementation, shape), shape, *call, tolerance=TOLERANCE if exact else 2e-3)


@shared.cases(*(one for one in ALL if one != ELSEWHERE))
def test_cutting_between_tiles_changes_no_bit(implementation, shape):
    check_cut(implementation, shape, np.float32)


@shared.cases("xla", *shared.KERNELS, shapes=(shared.MAMBA, shared.SELECTIVE))
def test_cutting_between_tiles_changes_no_bit_of_narrow_states(implementation, shape):
    check_cut(implementation, shape, np.dtype("bfloat16"))


def check_cut(implementation, shape, dtype):
    scan = scanned(implementation, shape, emitters_of_users=True)
    draw, options = Draw(), shared.how(Draw(1), shape)
    tokens, store = shared.entry(draw, shape, 4, shape.tile_size), shared.states(draw, shape, 4, dtype)
    y, after = scan(tokens, store, tiles_of([1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3]), **options)
    split, parts, read = store, [], 2
    for tile in range(4):
        y_one, split = scan(shared.part(tokens, [tile]), split, tiles_of([1], [read], [3]), **options)
        parts.append(y_one)
        read = 3
    for one, other in ((split[3], after[3]), (np.concatenate(parts), y)):
        if (implementation, shared.kind(shape)) == (shared.KERNELS[1], "selective"):
            # The interpreter compiles a program for each grid. XLA:CPU may fuse one's multiplications with additions,
            # and contracts a token's product with itself where the loop has one tile.
            assert_close(one, other, dtype, 1e-6 if dtype == np.float32 else None)
        else:
            assert_same_bits(one, other)


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 2, 64), (32, 1, 16)])
def test_several_heads_in_a_register_of_a_tpu(heads, groups, head_dim, erase, monkeypatch):
    # Heads of 64 go in pairs. Heads of 16 go in eights, and here in two blocks, each half a group.
    monkeypatch.setattr("kernels_pallas.recurrence.scan.pallas_tpu.BLOCK_BYTES", 16 * 16 * 128 * 4)
    sizes = {"heads": heads, "groups": groups, "head_dim": head_dim, "state": 128, "tile_size": 16}
    shape = dataclasses.replace(shared.SHAPES[0], **sizes, erase=erase)
    check(scanned(shared.KERNELS[0], shape, anew=True), shape, *ragged(shape))


def by_tokens(shape, entry, initial_state, options):
    """The sequential definition in JAX, for gradients."""
    entry = [v.swapaxes(0, 1) for v in entry]

    def of_channels(state, inputs):
        x, b, c, dt = inputs
        state = jnp.exp(dt[:, None] * options["a"]) * state + (dt * x)[:, None] * b[..., None]
        return state, (state * c[..., None]).sum(1) + options["d"] * x

    def of_heads(state, inputs):
        *vectors, value, log_decay, strength = inputs
        query, key = (jnp.repeat(v, value.shape[1] // v.shape[1], axis=1) for v in vectors)
        state = state * jnp.exp(log_decay).reshape(*value.shape[:2], 1, -1)
        error = value - (state * key[..., None, :]).sum(-1) if shape.erase else value
        state = state + (strength[..., None] * error)[..., None] * key[..., None, :]
        y, skip = (state * query[..., None, :]).sum(-1), options["skip"]
        return state, y if skip is None else y + skip[:, None] * value

    state, y = lax.scan(of_channels if shared.kind(shape) == "selective" else of_heads, initial_state, tuple(entry))
    return y.swapaxes(0, 1), state


EACH = pytest.mark.parametrize("shape", shared.ODD, ids=lambda s: s.name)


class TestSequence:
    """Of plain JAX."""

    def check(self, shape, tokens, **options):
        options = {**shared.how(Draw(1), shape), **options}
        static = {} if shared.kind(shape) == "selective" else {"chunk_size": 32}
        y, state = shared.program("sequence", "xla", shape, **static)(tokens, **options)
        want_y, want = shared.definition("sequence", shape)(tokens, **options)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(state, want, tolerance=TOLERANCE)
        return y, state

    @pytest.mark.smoke
    @EACH
    @pytest.mark.parametrize("length", [1, 31, 32, 101])
    def test_equals_definition(self, shape, length):
        """A batch of two lengths; the shorter row has NaN as padding."""
        tokens = shared.entry(Draw(length), shape, 2, length)
        shared.pad(tokens, 0, length // 2)
        y, _ = self.check(shape, tokens)
        assert (y[0, length // 2 :] == 0).all()

    @pytest.mark.parametrize("shape", shared.SHAPES, ids=lambda s: s.name)
    def test_continues_from_a_state(self, shape):
        draw = Draw()
        self.check(shape, shared.entry(draw, shape, 1, 37), initial_state=shared.states(draw, shape, 2)[1:])

    @EACH
    def test_gradients_equal_those_of_the_recurrence(self, shape):
        """With ordinary decays, and with decays that would overflow unmasked."""
        draw = Draw()
        tokens = shared.entry(draw, shape, 2, 41)
        state, options = shared.states(draw, shape, 3)[1:], shared.how(Draw(1), shape)

        def ours(tokens, state, options):
            return shared.plain("sequence", shape, implementation="xla")(tokens, initial_state=state, **options)

        def theirs(tokens, state, options):
            return by_tokens(shape, tokens, state, options)

        strong = type(tokens)(*tokens[:3], 300 * tokens[3], *tokens[4:])
        calls = ((each, state, options) for each in (tokens, strong))
        assert_same_gradients(ours, theirs, *calls, tolerance=2e-4)


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
def test_selective_kernel_with_several_blocks_of_channels(store, monkeypatch):
    """Also tiles of several parts and bodies of the kernel's loop, and a first tile that continues nothing: zeros."""
    for name, value in (("BLOCK_BYTES", 1), ("TOGETHER", 128), ("LONGEST", 16)):
        monkeypatch.setattr(f"kernels_pallas.selective_scan.pallas_tpu.{name}", value)
    shape, draw = dataclasses.replace(shared.SELECTIVE, inner=384, state=8, tile_size=48), Draw()
    tokens, store = shared.entry(draw, shape, 3, 48), shared.states(draw, shape, 6, store)
    shared.pad(tokens, 1, 30)
    scan = scanned(shared.KERNELS[0], shape, anew=True)
    check(scan, shape, tokens, store, tiles_of([0, 0, 1], [3, 0, 2], [0, 4, 5]), dtype=store.dtype)


def test_no_array_of_all_tokens_states_is_held():
    """On a CPU: test_tpu_compile.py sees what a TPU holds."""
    shape = dataclasses.replace(SELECTIVE[0].small(), tiles=64)
    call = call_of("selective_scan", shape, F32)
    compiled = jax.jit(program(call, "xla")).lower(*call.apart(call.arrays)).compile()
    of_all_tokens = 64 * shape.tile_size * shape.state * shape.inner * 4
    assert compiled.memory_analysis().temp_size_in_bytes < of_all_tokens / 4


def test_sequences_that_are_refused():
    tokens = on_device(shared.entry(Draw(), shared.ERASING, 2, 8))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        recurrence_sequence(tokens, erase=True, chunk_size=0)
    tokens, options = on_device((shared.entry(Draw(), shared.SELECTIVE, 2, 8), shared.how(Draw(), shared.SELECTIVE)))
    with pytest.raises(ValueError, match=r"entry\.c has shape"):
        shared.plain("sequence", shared.SELECTIVE)(tokens._replace(b=tokens.b[:, :, :2]), **options)
