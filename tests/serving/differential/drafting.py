"""Engines whose requests have drafts of every kind, all over one set of programs.

Each request has a source of its own: the draft layer, n-grams, or a script that knows the right continuation (from a
plain run) and spoils it as told. What the draft layer proposes and keeps is compared with what it makes of the whole
sequence at once: whatever a hit, a preemption or a step without drafts has left out would show.
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
from jaxtyping import Array

from mamba_jax.config.drafter import BlockConfig
from mamba_jax.drafts import BlockDrafts, DraftSource, MTPDrafts, NGramDrafts, StepFacts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.store import Store
from serving.core.requests.request import Request
from serving.engine.assembly import design
from tests.support.engines.engines import QUICK_COMPILE, Continuation
from tests.support.engines.shared_engines import MAX_LEN, PAGE, ROWS, SMALLEST, TILE, SharedEngines, engines_of
from tests.support.engines.step_programs import shared_programs
from tests.support.models.tiny_configs import ENGINE_VOCAB
from tests.support.stored_jit import StoredJit

MOST = 5
"""K of the traces' programs. Requests draft fewer where the host plans fewer."""
SPARE_SLOTS = ROWS * (2 * (1 + MOST) - 1)
"""Beyond one slot for each row: what traces may take away."""
SOURCES = ("mtp", "ngram", "right", "wrong", "mixed", "gaps")
"""The last four are scripts: drafts all right, all wrong, right and then wrong, right but often missing."""
COUNTS: tuple[int | str | None, ...] = (0, 1, 3, MOST, None, "adaptive")
"""Drafts of a request's steps; None: another number each time; "adaptive": as the engine's own policy has it."""
TIE = 1e-4
_NGRAMS = NGramDrafts(1, 3)


@dataclass(frozen=True)
class MixedDrafts:
    """A source for each seat. A request brings along its tokens, its script, and the number of its source."""

    mtp: bool
    """Whether the model has a draft layer. It then reads every row, whatever the row's source is."""
    layer: DraftSource
    """How the draft layer drafts."""

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
        seen = _NGRAMS.seat(seen, row_id, tokens[:MAX_LEN])
        return kind.at[row_id].set(tokens[-1]), script.at[row_id].set(tokens[MAX_LEN : 2 * MAX_LEN]), seen

    def propose(
        self, model: HybridModel, store: Store, state: tuple[Array, Array, Array], facts: StepFacts, count: int
    ) -> tuple[Array, Store, tuple[Array, Array, Array]]:
        kind, script, seen = state
        ngram, store, seen = _NGRAMS.propose(model, store, seen, facts, count)
        at = (facts.length + facts.kept + 1)[:, None] + jnp.arange(count)
        scripted = jnp.take_along_axis(script[facts.row_id], jnp.minimum(at, MAX_LEN - 1), axis=1)
        scripted = jnp.where((at < MAX_LEN) & facts.sampled[:, None], scripted, -1)
        own = kind[facts.row_id][:, None]
        drafts = jnp.where(own == SOURCES.index("ngram"), ngram, scripted)
        if self.mtp:
            layer, store, _ = self.layer.propose(model, store, None, facts, count)
            drafts = jnp.where(own == SOURCES.index("mtp"), layer, drafts)
        return drafts, store, (kind, script, seen)


@dataclass(frozen=True)
class Drafting:
    """How one request drafts."""

    source: str
    count: int | str | None
    seed: int
    """Of numbers that vary, and of what a script spoils."""

    def script(self, prompt: Sequence[int], line: Continuation) -> np.ndarray:
        """Drafts for each place of the sequence that a plain run has said; -1 = none."""
        said = np.array(line.tokens, np.int32)
        rng = np.random.default_rng(self.seed)
        wrong = (said + rng.integers(1, ENGINE_VOCAB, len(said))) % ENGINE_VOCAB
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

    def __init__(self, on: SharedEngines, most: int, layer: bool) -> None:
        self.on, self.most = on, most
        drafter = on.model.config.drafter
        self.of_blocks = isinstance(drafter, BlockConfig)
        source = BlockDrafts(drafter.mask_token, drafter.from_newest) if self.of_blocks else MTPDrafts()
        self.source = MixedDrafts(mtp=layer, layer=source)
        self.sources = SOURCES if self.source.mtp else SOURCES[1:]
        self._programs: dict[int, StepPrograms] = {}
        self._layer: Any = None

    @property
    def _options(self) -> dict[str, Any]:
        greedy = not self.on.samples and self.on.name != SMALLEST  # some of its planted faults are of sampling
        return {"source": self.source, "greedy": greedy} | self.on.options()

    def compile_anew(self) -> StepPrograms:
        """Programs that no other engine or run uses."""
        return StepPrograms(self.on.model, tile_size=TILE, **({"compiler_options": QUICK_COMPILE} | self._options))

    def programs_of(self, tile_size: int = TILE) -> StepPrograms:
        """Those that engines of such tiles share."""
        if tile_size not in self._programs:
            self._programs[tile_size] = shared_programs(self.on.model, tile_size=tile_size, **self._options)
        return self._programs[tile_size]

    def engine(
        self, mode: str, drafting: dict[str, Drafting], scripts: dict[str, np.ndarray], *, programs=None, **flags
    ):
        """An engine whose requests draft as `drafting` says (by request) and `scripts` have it (by choice)."""
        with mock.patch.object(design, "draft_source", return_value=self.source):
            sizes = {"num_speculative_tokens": self.most, "num_slots": 1 + ROWS * 2 * (1 + self.most), "num_pages": 13}
            programs = programs or self.programs_of(flags.get("tile_size", TILE))
            engine = self.on.engine(mode, programs=programs, **(sizes | flags))
        loop = engine.loop
        policy = loop.scheduler.drafts.wanted
        seat_batch, rngs = loop.seat, {name: random.Random(each.seed) for name, each in drafting.items()}

        def with_script(request: Request):
            batch = seat_batch(request)
            source = drafting[asked(request)].source
            kind = SOURCES.index(source if source in self.sources else "ngram")
            tokens = np.concatenate([batch.tokens, scripts[request.request_id], [kind]]).astype(np.int32)
            return dataclasses.replace(batch, tokens=tokens)

        def wanted(request: Request) -> int:
            count = drafting[asked(request)].count
            if isinstance(count, str):
                return policy(request)
            return rngs[asked(request)].randrange(self.most + 1) if count is None else min(count, self.most)

        loop.seat = with_script
        loop.scheduler.drafts.wanted = wanted
        return engine

    def layer(self, tokens: list[int]) -> tuple[np.ndarray | None, np.ndarray]:
        """Of the whole sequence at once: the draft layer's log-probabilities [length, vocab] after each token but the
        first, and its keys and values [length, 2 * heads, head_dim] as a page has them.

        Of a drafter of blocks only its keys and values.
        """
        if self._layer is None:
            config, of_blocks = self.on.model.config, self.of_blocks
            values = {path: leaf.get_value() for path, leaf in parameters(self.on.model).items()}

            def run(values, tokens, length):
                model = HybridModel.from_parameters(config, values)
                layout, attend = SequenceLayout.of(1, MAX_LEN, length[None]), SequenceLayout.attend
                hidden, _ = model.run(tokens, layout, None)
                if of_blocks:
                    last = model.drafter.layers[-1].attention
                    k, v = last.keys_values(model.draft_input(hidden), layout)
                    return None, jnp.stack([k, v], axis=2).reshape(MAX_LEN, -1, k.shape[-1])
                before = jnp.roll(model.draft_input(hidden), 1, axis=0)
                with mock.patch.object(SequenceLayout, "attend", autospec=True, side_effect=attend) as attended:
                    out, _ = model.draft(tokens, before, layout, None)
                _, _, k, v, *_ = attended.call_args.args
                logits = model.draft_logits(out)
                of_draft = model.draft_tokens(jnp.arange(logits.shape[1]))
                said = jnp.full((MAX_LEN, ENGINE_VOCAB), -jnp.inf).at[:, of_draft].set(jax.nn.log_softmax(logits))
                return said, jnp.stack([k, v], axis=2).reshape(MAX_LEN, -1, k.shape[-1])

            self._layer = StoredJit(run), values
        run, values = self._layer
        padded = np.zeros(MAX_LEN, np.int32)
        padded[: len(tokens)] = tokens
        said, kept = run(values, padded, np.int32(len(tokens)))
        return None if said is None else np.asarray(said), np.asarray(kept)


@functools.cache
def drafters(name: str, most: int = MOST, *, layer: bool = True) -> Drafters:
    """Those of each model; `layer` says whether its draft layer runs, if it has one."""
    on = engines_of(name)
    return Drafters(on, most, layer and on.model.config.drafts)


def asked(request: Request) -> str:
    """The id under which a request was added; its further choices have ids of their own."""
    return request.request_id.partition("#")[0]


@dataclass
class _Look:
    """At one row after a step."""

    request: Request
    newest: int
    """The index of the token that was sampled last."""
    draft: int | None
    """What the draft layer proposes to come after it; None where another source has proposed."""
    kept: np.ndarray
    """The layer's keys and values of all tokens up to the newest."""


class Watch:
    """Looks at what the draft layer leaves on the device, step by step, and judges it in the end."""

    def __init__(self, drafters: Drafters, drafting: dict[str, Drafting]) -> None:
        self._drafters, self._drafting = drafters, drafting
        self._looks: list[_Look] = []

    def look(self, loop) -> None:
        """After a step: at what its rows will verify next."""
        if loop._flight is None or not self._drafters.source.mtp:
            return
        length, drafts = np.asarray(loop._rows.length), np.asarray(loop._rows.drafts)
        pages = np.asarray(loop.store.kv[-1])
        for row in loop._flight.plan.rows:
            request, seat = row.request, row.request.progress.row_id
            if row.sample and seat:
                newest = int(length[seat])
                index = np.arange(newest + 1)
                table = np.append(np.array(row.pages), 0)[np.minimum(index // PAGE, len(row.pages))]
                own = self._drafting[asked(request)].source == "mtp"
                draft = int(drafts[seat, 0]) if own else None
                self._looks.append(_Look(request, newest, draft, pages[table, index % PAGE]))

    def wrong(self) -> list[str]:
        """Drafts, keys and values that are not what the layer makes of the whole sequence. (Near-ties are equal.)"""
        whole: dict[str, tuple[np.ndarray | None, np.ndarray]] = {}
        found, last = [], {}
        for look in self._looks:
            request = look.request
            if look.newest >= min(len(request.tokens), request.max_total - 1):
                continue  # the last token (which has no page), what comes after a stop, or an aborted request
            if request.request_id not in whole:
                whole[request.request_id] = self._drafters.layer(request.tokens)
            of_all = whole[request.request_id][0]
            said = None if of_all is None else of_all[look.newest]
            draft = look.draft
            if said is not None and draft is not None and (draft < 0 or not said.max() - said[draft] < TIE):
                found.append(f"request {request.request_id}: draft {draft} after token {look.newest}")
            last[request.request_id] = look
        for name, look in last.items():
            # Pairs begin at the second token. A drafter of blocks has read all but the newest one.
            tokens = slice(0, look.newest) if self._drafters.of_blocks else slice(1, look.newest + 1)
            same = np.isclose(look.kept[tokens], whole[name][1][tokens], atol=TIE).all(axis=(1, 2))
            if not same.all():
                wrong = tokens.start + np.flatnonzero(~same)
                found.append(f"request {name}: draft layer's keys and values of tokens {wrong}")
        return found

    @property
    def count(self) -> int:
        """Drafts of the layer that were looked at."""
        return sum(look.draft is not None for look in self._looks)


def tally(met: Counter, drafting: dict[str, Drafting], outputs: dict[str, Any]) -> None:
    """Counts drafts and what became of them, by source."""
    for name, output in outputs.items():
        how, drafts = drafting[name], output.metrics.drafts
        met.update({f"{what} {how.source}": getattr(drafts, what) for what in ("drafted", "accepted", "wasted")})
        met[f"K {how.count}"] += 1
