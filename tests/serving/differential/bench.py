"""Tiny models with real arithmetic, engines over shared compiled programs, and plain greedy decoding to compare with.

Every engine of a model has a store of the same size and one shape for each kind of step, so that thousands of traces
share a dozen programs. What varies (cache mode, block size, token budget, traffic) is host policy only.

All of a new store is NaN: whatever a step uses of a slot or page that nobody has written shows in its results.
"""

import functools
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.initial import initial_values
from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig, MLPConfig, RopeConfig
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepPrograms
from mamba_jax.store import init_store
from serving.config import EngineConfig
from serving.engine import build
from serving.engine.batching import PrefillShape
from serving.engine.sampling_params import SamplingParams

VOCAB, HIDDEN = 96, 32
TILE, PAGE, MAX_LEN, ROWS = 8, 8, 88, 6
LONGEST = 24
"""Output tokens of a reference."""
# 6 rows of up to 11 pages each share 14; 6 rows and their second slots take nearly all of 13.
FLAGS = {
    "tile_size": TILE,
    "page_size": PAGE,
    "max_model_len": MAX_LEN,
    "max_num_seqs": ROWS,
    "num_slots": 13,
    "num_pages": 14,
    "warmup": False,
}
PREFILL = PrefillShape(tokens=MAX_LEN + PAGE, rows=ROWS, tiles=(MAX_LEN + PAGE) // TILE + ROWS)

_MAMBA = MambaConfig(num_heads=4, head_dim=8, state_size=12, num_groups=2, conv_width=4)
_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, input_size=HIDDEN)
_MLP = MLPConfig(intermediate_size=40, activation="relu2", gated=False)


def _config(pattern: str, **fields) -> HybridConfig:
    return HybridConfig(
        family="test", vocab_size=VOCAB, hidden_size=HIDDEN, norm_eps=1e-5, pattern=pattern, mamba=_MAMBA, **fields
    )


CONFIGS = {
    # The kinds of layers of NemotronH, of plain Mamba2, and of FalconH1: apart, without attention, side by side.
    "nemotronh": _config("M*-M", attention=_ATTENTION, mlp=_MLP, mtp_pattern="*-"),
    "mamba2": _config("MMM"),
    "falconh1": _config(
        "P-P",
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=1, head_dim=8, scale=0.3, input_size=HIDDEN, rope=RopeConfig(theta=100.0, size=8)
        ),
        mlp=MLPConfig(intermediate_size=40, activation="silu", gated=True),
    ),
}


SMALLEST = "smallest"
"""The model of the planted faults, each of which needs programs of its own."""
_SMALLEST = _config("M*", attention=_ATTENTION, mtp_pattern="*")

TAGGED = {"nemotronh": (False, True), "mamba2": (True,), "falconh1": (False,)}
"""Whether a model's stores have tags (`debug_state`): with tags, programs are others."""
PROGRAMS = {name: 1 + 2 * len(kinds) for name, kinds in TAGGED.items()}
"""What is compiled for each model: a program to take seats, and one of each kind for each kind of store."""


@functools.cache
def model_of(name: str) -> HybridModel:
    """Random weights, by name. Tokens 2i and 2i+1 of `nemotronh` are always nearly equally likely."""
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridModel(CONFIGS.get(name, _SMALLEST), rngs=nnx.Rngs(0))))
    rng, filled = np.random.default_rng(3), []
    for path, leaf in nnx.to_flat_state(state):
        full = ".".join(map(str, path))
        value = initial_values(full, leaf.shape, rng.standard_normal, rng.random)
        if full.endswith("dt_bias"):
            value = value + 2.5  # what is absorbed must make a difference,
        if full.lower().endswith("a_log"):
            value = value - 2.5  # and must still do so many tokens later
        if name == "nemotronh" and "head" in full:
            value[1::2] = value[::2] + 0.02 * value[1::2]
        filled.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


@dataclass(frozen=True)
class Line:
    """What one choice says: tokens, each one's log-probability, and by how much it was likelier than the next."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


class Bench:
    """Engines of one model over one set of programs, and its reference outputs, made when first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = model_of(name)
        self.programs = self.compile_anew()
        self._alone: dict[tuple, list[Line]] = {}
        self._full = None

    def compile_anew(self) -> StepPrograms:
        """Programs that nobody shares. LLVM's optimizations would take longer than what they save."""
        return StepPrograms(self.model, tile_size=TILE, compiler_options={"xla_backend_optimization_level": 0})

    def engine(self, mode: str | None, *, programs=None, **flags):
        """An engine whose steps all have one shape for decoding and one for prefill."""
        config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | flags))
        with mock.patch.object(build, "init_laid_out", _poisoned):
            engine = build.assemble(config, self.model, programs=programs or self.programs).engine
        engine.loop.batches.decode_shapes = [ROWS]
        engine.loop.batches.prefill_shapes = [PREFILL]
        return engine

    def alone(self, prompt: tuple[int, ...], *, seed: int | None = None) -> list[Line]:
        """Each choice of the prompt by itself in an engine of its own, in one chunk and without a cache.

        Greedy has one choice; with a seed there are three, sampled.
        """
        key = (prompt, seed)
        if key not in self._alone:
            params = SamplingParams(
                max_tokens=min(LONGEST, MAX_LEN - len(prompt)),
                logprobs=2,
                ignore_eos=True,
                n=1 if seed is None else 3,
                temperature=0.0 if seed is None else 0.9,
                seed=seed,
            )
            engine = self.engine(
                "none",
                state_block_size=32,
                max_num_batched_tokens=MAX_LEN,
                debug_state=TAGGED.get(self.name, (False,))[0],
            )
            output = engine.add_request("alone", {"prompt_token_ids": list(prompt)}, params)
            finish(engine)
            self._alone[key] = [line_of(choice) for choice in output.outputs]
        return self._alone[key]

    def whole(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities [length, vocab] of the whole sequence at once, without a store."""
        if self._full is None:
            graph, state = nnx.split(self.model)
            run = jax.jit(lambda state, row, length: jax.nn.log_softmax(nnx.merge(graph, state)(row, length)))
            self._full = functools.partial(run, state)
        row = np.zeros((1, MAX_LEN), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(self._full(row, np.array([len(tokens)])))[0, : len(tokens)]


@functools.cache
def bench(name: str) -> Bench:
    """The one of each model."""
    return Bench(name)


def finish(engine) -> None:
    """Run until nothing is left to do, the last step in flight included."""
    for _ in range(3000):
        if not engine.loop.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def line_of(choice) -> Line:
    """A choice that was asked for with two or more log-probabilities."""
    gaps = []
    for table in choice.logprobs:
        best = sorted((entry.logprob for entry in table.values()), reverse=True)
        gaps.append(best[0] - best[1])
    chosen = [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
    return Line(list(choice.token_ids), chosen, gaps)


def _poisoned(*args, **kwargs):
    store = init_store(*args, **kwargs)

    def fill(leaf):
        return jnp.full(leaf.shape, jnp.nan, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(fill, store)
