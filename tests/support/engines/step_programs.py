"""Compiled steps that tests share: within a process, with the other processes of a run, and with later runs. Steps that
run faulty code, and steps that compute nothing."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np

from mamba_jax.model import HybridModel
from mamba_jax.program_cache import ProgramCache
from mamba_jax.programs import StepPrograms, samples
from serving.engine.assembly import build
from serving.engine.compiled_programs import keep_programs
from serving.engine.steps import batching
from tests.support.engines.engines import QUICK_COMPILE


class SharedPrograms(StepPrograms):
    """Greedy programs, which compile in half of the time, until a request samples; then programs with everything."""

    def change_rows(self, rows, batch):
        if self.greedy and samples(batch):
            self.greedy, self.cache = False, ProgramCache()
            if self.kept is not None:
                self.keep()
        return super().change_rows(rows, batch)

    def keep(self):
        """Saves the programs for later runs; they are also found by the text of the file that defines the source."""
        kept = keep_programs(self)
        if kept is not None and self.source is not None:
            kept._description += inspect.getsource(inspect.getmodule(type(self.source)))


def shared_programs(model: HybridModel, *, greedy: bool = True, **options) -> StepPrograms:
    """`StepPrograms` of a model, saved for later runs. Not for tests that change code which a program traces.

    `greedy`: most requests are; False saves the greedy programs where most sample.
    """
    programs = SharedPrograms(model, greedy=greedy, **({"compiler_options": QUICK_COMPILE} | options))
    programs.keep()
    return programs


own_programs = functools.partial(SharedPrograms, greedy=True, compiler_options=QUICK_COMPILE)
"""The same for one engine: nothing is saved."""


@contextlib.contextmanager
def few_programs(make: Callable[..., StepPrograms]) -> Iterator[None]:
    """Engines that are built meanwhile have programs by `make`, and of each kind of step the widest one only."""
    buckets = batching.prefill_buckets
    with (
        mock.patch.object(build, "StepPrograms", make),
        mock.patch.object(batching, "decode_buckets", lambda rows, **options: [rows]),
        mock.patch.object(batching, "prefill_buckets", lambda *args, **options: buckets(*args, **options)[-1:]),
    ):
        yield


class NoPrograms:
    """Compiles and computes nothing: emits the same token at every step and leaves the store unchanged."""

    compilations = 0
    adapters = None
    kernels = SimpleNamespace(refused={})
    vocab_size, max_logprobs, sampling_masks = 1 << 16, 20, False

    def change_rows(self, rows, batch):
        return rows

    def step(self, store, rows, batch):
        emitted = jnp.asarray(np.where(np.asarray(batch.sample), 5, -1)[:, None].astype(np.int32))
        finite = jnp.ones(len(emitted), bool)
        return store, rows, SimpleNamespace(tokens=emitted, finite=finite, num_drafts=None, prompt_logprobs=None)


class PatchedPrograms:
    """Runs batches of one kind with `own` programs, of code with a planted fault, and all others with `shared` ones.

    `compiles` is "decode", "prefill", or None: no batches run with `own` programs.
    """

    adapters = None
    compilations = 0

    def __init__(self, shared: StepPrograms, own: StepPrograms | None, compiles: str | None) -> None:
        self.shared, self.own = shared, own
        self.compiles = f"{compiles.capitalize()}Batch" if compiles else ""
        self.change_rows, self.kernels = shared.change_rows, shared.kernels
        self.vocab_size, self.max_logprobs, self.sampling_masks = (
            shared.vocab_size, shared.max_logprobs, shared.sampling_masks
        )  # fmt: skip

    def step(self, store, rows, batch):
        own = type(batch).__name__ == self.compiles
        return (self.own if own else self.shared).step(store, rows, batch)
