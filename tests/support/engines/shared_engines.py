"""Engines of tiny models over shared compiled programs, and plain decoding by the same engines to compare with.

Every engine of a model has a store of the same size and one shape for each kind of step, so that thousands of traces
share a dozen programs. What varies (cache mode, block size, token budget, traffic) is host policy only.

A new store is filled with NaN, so a step that reads an unwritten slot or page has NaN in its results.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.fixed_order import log_sum_exp
from mamba_jax.adapters import Adapters
from mamba_jax.config import HybridConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import INVARIANT as INVARIANT_KERNELS
from mamba_jax.programs import KernelChoice, StepPrograms
from mamba_jax.train.score import SCORE_OPTIONS
from serving.config import EngineConfig
from serving.engine.assembly import build
from serving.engine.assembly.devices import device_meshes, on_mesh
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.batching import PrefillShape
from tests.support.engines.engines import OPTIMIZED, QUICK_COMPILE, Continuation, finish
from tests.support.engines.spoiled_store import spoiled_sharded_store, spoiled_store
from tests.support.engines.step_programs import own_programs, shared_programs
from tests.support.models.adapter_contents import read_contents
from tests.support.models.letter_tokens import letters
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import FOR_ENGINES
from tests.support.stored_jit import StoredJit

TILE, PAGE, MAX_LEN, ROWS = 8, 8, 88, 6
LONGEST = 24
"""Output tokens of a reference."""
# 6 rows of up to 11 pages each share 14; 6 rows and their second slots take nearly all of 13.
FLAGS = {"tile_size": TILE, "page_size": PAGE, "max_model_len": MAX_LEN, "max_num_seqs": ROWS}
FLAGS |= {"num_slots": 13, "num_pages": 14, "warmup": False, "replay_interval": 1}
PREFILL = PrefillShape(tokens=MAX_LEN + PAGE, rows=ROWS, tiles=(MAX_LEN + PAGE) // TILE + ROWS)
SMALL_PREFILL = PrefillShape(tokens=2 * TILE, rows=2, tiles=4)

SMALLEST = "smallest"
"""The model of the planted faults, each of which needs programs of its own."""
SAMPLED = "nemotronh"
"""The model whose traffic also samples: sampling knows no recurrences, and compiles for longer than most of them."""
TAGGED = {"nemotronh": (False, True), "mamba2": (True,)}
TAGGED |= dict.fromkeys(("joined", "kimi", "lightning", "selective"), (False,))
"""Whether a model's stores have tags (`debug_state`): with tags, programs are others."""
PROGRAMS = {name: 3 + 2 * len(kinds) for name, kinds in TAGGED.items()}
"""At most so many programs are compiled for each model: two to take seats, with and without penalties, one for page
tables, and one of each kind of step for each kind of store."""


TOLERANCE = 1e-4
"""Of log-probabilities, where nothing is kept in fewer bits."""


@dataclass(frozen=True)
class Variant:
    """A model whose engines keep their state in fewer bits, or over several devices."""

    model: str
    flags: dict[str, Any]
    """Whatever else is asked of its engines."""
    tolerance: float
    """Of log-probabilities: by how much they may depend on what was reused, and on how prompts were cut."""
    of_whole: float
    """Likewise, compared with the whole sequence at once, without a store."""
    dtype: Any = jnp.float32
    """Of the weights and activations."""


MEMBERS = "two members of two devices, invariant"
VARIANTS = {
    "fp8 pages": Variant("joined", {"kv_cache_dtype": "fp8"}, 5e-3, 0.3),
    "bfloat16 states": Variant("joined", {"ssm_dtype": "bfloat16"}, 2e-2, 5e-2),
    "float16 states": Variant("joined", {"ssm_dtype": "float16"}, 4e-3, 1e-2),
    "two members": Variant("joined", {"context_parallel_size": 2}, TOLERANCE, TOLERANCE),
    # The training forward does not merge parts of attention.
    MEMBERS: Variant(
        "joined", {"context_parallel_size": 2, "tensor_parallel_size": 2, "schedule_invariant": True}, 0.0, TOLERANCE
    ),
}
EXACT = {
    f"{kind}, exact": Variant("nemotronh", {"checkpoint_dtype": kind, "state_block_size": 2 * TILE}, 2e-3, 0.3)
    for kind in ("int8", "bfloat16")
}
"""Whose states are rounded every so many tokens, and so depend on nothing else."""
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 4, "max_initial_states": 2}
INVARIANT_MODELS = (SAMPLED, "joined", "experts", "kimi", "selective")
INVARIANT = {
    f"{name}, invariant {dtype}": Variant(name, {"schedule_invariant": True}, 0.0, 0.0, jnp.dtype(dtype))
    for name in (*INVARIANT_MODELS, "smallest")
    for dtype in ("float32", "bfloat16")
}
"""Whose log-probabilities have the same bits in every schedule, and in the training forward."""
ADAPTED = {
    f"{name}, adapters": Variant(name, LORA, 1e-4, 1e-4) for name in ("nemotronh", "joined", "kimi", "smallest")
} | {
    f"{name}, adapters": replace(variant, flags=variant.flags | LORA)
    for name, variant in [*INVARIANT.items(), (MEMBERS, VARIANTS[MEMBERS])]
}
"""Models whose requests may have adapters."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalized": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    "biased": {"logit_bias": {5: 3.0, 60: 2.0, 33: -100.0, 34: -100.0}},
    "held back": {"min_tokens": 7, "stop_token_ids": tuple(range(0, 96, 4))},
}
"""Names of options that change the tokens of an output, in addition to the drawn ones."""


class SharedEngines:
    """Engines of one model over one set of programs, and its reference outputs, made when first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        variant = (VARIANTS | EXACT | ADAPTED | INVARIANT).get(name, Variant(name, {}, TOLERANCE, TOLERANCE))
        self.flags, self.tolerance, self.of_whole = variant.flags, variant.tolerance, variant.of_whole
        self.samples = variant.model == SAMPLED
        model = long_memory_model(FOR_ENGINES[variant.model], near_ties=name == "nemotronh", dtype=variant.dtype)
        (self.mesh,) = device_meshes(EngineConfig.create(**(FLAGS | self.flags)))
        self.model = on_mesh(model, self.mesh)
        self.programs = self._shared_programs(TILE)
        self._programs = {(TILE, 0): self.programs}
        self._alone: dict[tuple, list[Continuation]] = {}

    def compile_anew(self) -> StepPrograms:
        """Programs that no other engine or run uses, for tests that change code which they trace."""
        options = {"compiler_options": QUICK_COMPILE, "greedy": not self.samples}
        return StepPrograms(self.model, tile_size=TILE, **(options | self.options()))

    @property
    def invariant(self) -> bool:
        """Whether the bits of log-probabilities do not depend on the schedule."""
        return bool(self.flags.get("schedule_invariant"))

    def options(self) -> dict[str, Any]:
        """Of `StepPrograms`, in addition to those of all tests."""
        options: dict[str, Any] = {"adapters": self.adapters(), "mesh": self.mesh}
        if self.invariant:
            options |= {"kernels": KernelChoice(named=INVARIANT_KERNELS), "compiler_options": OPTIMIZED}
        return options

    @property
    def adapted(self) -> bool:
        """Whether requests may have adapters."""
        return self.name in ADAPTED

    def adapters(self) -> Adapters | None:
        """Memory for adapters, for programs of their own; None if requests have none."""
        if not self.adapted:
            return None
        count, rank = self.flags["max_loras"], self.flags["max_lora_rank"]
        return Adapters(self.model, count=count, rank=rank, mesh=self.mesh)

    def programs_of(self, tile_size: int, side: int = 0) -> StepPrograms:
        """Those that engines of such tiles share. Engines that load adapters at the same time differ in `side`."""
        key = tile_size, side if self.adapted else 0
        if key not in self._programs:
            self._programs[key] = self._shared_programs(tile_size)
        return self._programs[key]

    def _shared_programs(self, tile_size: int) -> StepPrograms:
        make = shared_programs if self.mesh is None else own_programs
        return make(self.model, tile_size=tile_size, greedy=not self.samples, **self.options())

    def engine(self, mode: str | None, *, programs=None, eos_token_ids=(), side: int = 0, **flags):
        """An engine whose steps have one shape for decoding and one for prefill, or few. `side`: see `programs_of`."""
        config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | flags | self.flags))
        stores = {"init_laid_out": spoiled_store, "sharded_store": spoiled_sharded_store}
        with mock.patch.multiple(build, **stores):
            programs = programs or self.programs_of(config.tile_size, side)
            built = build.assemble(
                config, self.model, tokenizer=letters(), eos_token_ids=eos_token_ids, programs=programs
            )
        engine = built.engine
        # Bits depend on the number of rows where an operation is not invariant.
        engine.loop.batches.decode_shapes = [1, 3, ROWS] if self.invariant else [ROWS]
        engine.loop.batches.prefill_shapes = [SMALL_PREFILL, PREFILL] if self.invariant else [PREFILL]
        if engine.loop.batches.mixed_shapes:
            engine.loop.batches.mixed_shapes = engine.loop.batches.prefill_shapes
        return read_contents(engine, self.model) if self.adapted else engine

    def alone(
        self,
        prompt: tuple[int, ...],
        *,
        seed: int | None = None,
        sampling: str = "plain",
        adapter: LoRARequest | None = None,
    ) -> list[Continuation]:
        """Each choice of the prompt by itself in an engine of its own, in one chunk and without a cache.

        Greedy has one choice; with a seed there are three, sampled. `sampling` is one of `SAMPLINGS`.
        """
        key = (prompt, seed, sampling, adapter and adapter.lora_path)
        if key not in self._alone:
            drawn = {"temperature": 0.0} if seed is None else {"n": 3, "temperature": 0.9, "seed": seed}
            length = min(LONGEST, MAX_LEN - len(prompt))
            params = SamplingParams(max_tokens=length, logprobs=2, ignore_eos=True, **drawn, **SAMPLINGS[sampling])
            tagged = TAGGED.get(self.name, (False,))[0]
            engine = self.engine("none", state_block_size=32, max_num_batched_tokens=MAX_LEN, debug_state=tagged)
            output = engine.add_request("alone", {"prompt_token_ids": list(prompt)}, params, lora_request=adapter)
            finish(engine)
            self._alone[key] = [Continuation.of(choice) for choice in output.outputs]
        return self._alone[key]

    def whole(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities [length, vocab] of the whole sequence at once, without a store."""
        row = np.zeros((1, MAX_LEN), np.int32)
        row[0, : len(tokens)] = tokens
        values = {path: leaf.get_value() for path, leaf in parameters(self.model).items()}
        run = _whole(self.model.config, self.invariant)
        with self.programs.kernels.applied():
            return np.asarray(run(values, row, np.array([len(tokens)])))[0, : len(tokens)]


@functools.cache
def _whole(config: HybridConfig, invariant: bool) -> StoredJit:
    def run(values: dict[str, jax.Array], row: jax.Array, length: jax.Array) -> jax.Array:
        logits = HybridModel.from_parameters(config, values)(row, length)
        return logits - log_sum_exp(logits)

    return StoredJit(run, compiler_options=SCORE_OPTIONS | OPTIMIZED if invariant else None)


@functools.cache
def engines_of(name: str) -> SharedEngines:
    """Those of each model: a name in `tiny_configs.FOR_ENGINES`, `VARIANTS`, `EXACT`, `ADAPTED` or `INVARIANT`."""
    return SharedEngines(name)
