"""Engines whose requests have drafts of every kind, all over one set of programs.

Each request has a source of its own: the draft layer, n-grams, or a script that knows the right continuation (from a
plain run) and spoils it as told. What the draft layer says is also compared with what it says of the whole sequence at
once: so every key and value that it should have is there, after hits, preemption, and steps without drafts.
"""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from mamba_jax.drafts import DraftModel, MTPDrafts, NGramDrafts, StepFacts
from mamba_jax.layout import SequenceLayout
from mamba_jax.programs import StepPrograms
from mamba_jax.store import Store
from serving.core import Request
from serving.engine import build
from tests.serving.differential.bench import MAX_LEN, ROWS, TILE, VOCAB, Bench, Line, bench

MOST = 5
"""K of the programs. Requests draft fewer where the host plans fewer."""
# Room for second sets of slots; traces take some of it away.
FLAGS = {"num_speculative_tokens": MOST, "num_slots": 1 + ROWS * 2 * (1 + MOST), "num_pages": 13}
SPARE_SLOTS = ROWS * (2 * (1 + MOST) - 1)
SOURCES = ("mtp", "ngram", "right", "wrong", "mixed", "gaps")
"""The last four are scripts: drafts all right, all wrong, right and then wrong, right but often missing."""
COUNTS: tuple[int | None, ...] = (0, 1, 3, MOST, None)
"""Drafts of a request's steps; None: another number each time."""
TIE = 1e-4
_NGRAMS = NGramDrafts(1, 3)


@dataclass(frozen=True)
class MixedDrafts:
    """A source for each seat. A request brings along its tokens, its script, and the number of its source."""

    mtp: bool
    """Whether the model has a draft layer. It then reads every row, whatever the row's source is."""

    @property
    def sees_tokens(self) -> bool:
        return True

    @property
    def stores_kv(self) -> bool:
        return self.mtp

    def init(self, *, seats: int, max_len: int) -> tuple[Array, Array, Array]:
        tokens = _NGRAMS.init(seats=seats, max_len=max_len)
        return jnp.zeros(seats, jnp.int32), jnp.full_like(tokens, -1), tokens

    def seat(self, state: tuple[Array, Array, Array], row_id: Array, tokens: Any) -> tuple[Array, Array, Array]:
        kind, script, seen = state
        return (
            kind.at[row_id].set(tokens[-1]),
            script.at[row_id].set(tokens[MAX_LEN : 2 * MAX_LEN]),
            _NGRAMS.seat(seen, row_id, tokens[:MAX_LEN]),
        )

    def propose(
        self, model: DraftModel, store: Store, state: tuple[Array, Array, Array], facts: StepFacts, count: int
    ) -> tuple[Array, Store, tuple[Array, Array, Array]]:
        kind, script, seen = state
        ngram, store, seen = _NGRAMS.propose(model, store, seen, facts, count)
        at = (facts.length + facts.kept + 1)[:, None] + jnp.arange(count)
        scripted = jnp.take_along_axis(script[facts.row_id], jnp.minimum(at, MAX_LEN - 1), axis=1)
        scripted = jnp.where((at < MAX_LEN) & facts.sampled[:, None], scripted, -1)
        own = kind[facts.row_id][:, None]
        drafts = jnp.where(own == SOURCES.index("ngram"), ngram, scripted)
        if self.mtp:
            layer, store, _ = MTPDrafts().propose(model, store, None, facts, count)
            drafts = jnp.where(own == SOURCES.index("mtp"), layer, drafts)
        return drafts, store, (kind, script, seen)


@dataclass(frozen=True)
class Drafting:
    """How one request drafts."""

    source: str
    count: int | None
    seed: int
    """Of numbers that vary, and of what a script spoils."""

    def script(self, prompt: Sequence[int], line: Line) -> np.ndarray:
        """Drafts for each place of the sequence that a plain run has said; -1 = none."""
        said = np.array(line.tokens, np.int32)
        rng = np.random.default_rng(self.seed)
        wrong = (said + rng.integers(1, VOCAB, len(said))) % VOCAB
        spoiled = rng.random(len(said)) < 0.3
        script = {
            "right": said,
            "wrong": wrong,
            "mixed": np.where(spoiled, wrong, said),
            "gaps": np.where(spoiled, -1, said),
        }.get(self.source, np.full_like(said, -1))
        out = np.full(MAX_LEN, -1, np.int32)
        out[len(prompt) : len(prompt) + len(said)] = script
        return out


class Drafters:
    """What is shared by all engines of one model that draft: a source and its programs."""

    def __init__(self, on: Bench) -> None:
        self.on = on
        self.source = MixedDrafts(bool(on.model.config.mtp_pattern))
        self.sources = SOURCES if self.source.mtp else SOURCES[1:]
        self.programs = self.compile_anew()
        self._layer: Any = None

    def compile_anew(self) -> StepPrograms:
        """Programs that nobody shares."""
        options = {"xla_backend_optimization_level": 0}
        return StepPrograms(self.on.model, tile_size=TILE, source=self.source, compiler_options=options)

    def engine(
        self, mode: str, drafting: dict[str, Drafting], scripts: dict[str, np.ndarray], *, programs=None, **flags
    ):
        """An engine whose requests draft as `drafting` says (by request) and `scripts` have it (by choice)."""
        with mock.patch.object(build, "draft_source", return_value=self.source):
            engine = self.on.engine(mode, programs=programs or self.programs, **(FLAGS | flags))
        loop = engine.loop
        seat_batch, rngs = loop._seat_batch, {name: random.Random(each.seed) for name, each in drafting.items()}

        def with_script(request: Request):
            batch = seat_batch(request)
            kind = SOURCES.index(drafting[asked(request)].source)
            tokens = np.concatenate([batch.tokens, scripts[request.request_id], [kind]]).astype(np.int32)
            return dataclasses.replace(batch, tokens=tokens)

        def drafts_for(request: Request) -> int:
            count = drafting[asked(request)].count
            return rngs[asked(request)].randrange(MOST + 1) if count is None else count

        loop._seat_batch = with_script
        loop.scheduler.host.drafts_for = drafts_for
        return engine

    def layer(self, tokens: list[int]) -> np.ndarray:
        """Log-probabilities [length, vocab] of the draft layer after each token (but the first), all at once."""
        if self._layer is None:
            graph, state = nnx.split(self.on.model)

            def run(state, tokens, length):
                model = nnx.merge(graph, state)
                layout = SequenceLayout.of(1, MAX_LEN, length[None])
                hidden, _ = model.hidden(tokens, layout, None)
                out, _ = model.draft(tokens, jnp.roll(hidden, 1, axis=0), layout, None)
                return jax.nn.log_softmax(model.logits(out))

            self._layer = jax.jit(run), state
        run, state = self._layer
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(run(state, padded, np.int32(len(tokens))))[: len(tokens)]


@functools.cache
def drafters(name: str) -> Drafters:
    """Those of each model."""
    return Drafters(bench(name))


def asked(request: Request) -> str:
    """The id under which a request was added; its further choices have ids of their own."""
    return request.request_id.partition("#")[0]


class Watch:
    """Looks at the first drafts that the draft layer leaves on the device, step by step, and judges them in the end."""

    def __init__(self, drafters: Drafters, drafting: dict[str, Drafting]) -> None:
        self._drafters, self._drafting = drafters, drafting
        self._seen: list[tuple[Request, int, int]] = []

    def look(self, loop) -> None:
        """After a step: at what its rows will verify next."""
        if loop._flight is None:
            return
        length, drafts = np.asarray(loop._rows.length), np.asarray(loop._rows.drafts)
        for row in loop._flight.plan.rows:
            request = row.request
            if row.sample and request.row_id and self._drafting[asked(request)].source == "mtp":
                self._seen.append((request, int(length[request.row_id]), int(drafts[request.row_id, 0])))

    def wrong(self) -> list[str]:
        """Drafts that are not what the layer says of the whole sequence. Near-ties count as equal."""
        said: dict[str, np.ndarray] = {}
        found = []
        for request, newest, draft in self._seen:
            if newest >= min(len(request.tokens), request.max_total - 1):
                continue  # the last token (which has no page), what comes after a stop, or an aborted request
            table = said.setdefault(request.request_id, self._drafters.layer(request.tokens))[newest]
            if not (draft >= 0 and table.max() - table[draft] < TIE):
                found.append(f"request {request.request_id}: draft {draft} after token {newest}, not {table.argmax()}")
        return found

    @property
    def count(self) -> int:
        """Drafts that were looked at."""
        return len(self._seen)


def tally(met: Counter, drafting: dict[str, Drafting], outputs: dict[str, Any]) -> None:
    """Counts drafts and what became of them, by source."""
    for name, output in outputs.items():
        how, drafts = drafting[name], output.metrics.drafts
        met[f"drafted {how.source}"] += drafts.drafted
        met[f"accepted {how.source}"] += drafts.accepted
        met[f"wasted {how.source}"] += drafts.wasted
        met[f"K {how.count}"] += 1
