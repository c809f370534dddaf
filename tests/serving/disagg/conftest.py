"""A pair of engines in one process, over shared programs: one computes prompts, the other goes on from them."""

import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.initial import initial_values
from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig, MLPConfig
from mamba_jax.drafts import MTPCache, MTPDrafts, NGramDrafts
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepPrograms
from serving.config import EngineConfig
from serving.disagg.arrangement import Arrangement
from serving.disagg.decode_side import DecodeSide
from serving.disagg.manifest import model_digest
from serving.disagg.peer import DirectPeer
from serving.disagg.prefill_side import PrefillSide
from serving.disagg.prefilling import ONCE, fed_tokens, ticket_of
from serving.disagg.transport import DirectTransport
from serving.disagg.wire import Ticket
from serving.disagg.worker import Worker
from serving.engine.batching import PrefillShape
from serving.engine.build import assemble
from serving.engine.sampling_params import SamplingParams

VOCAB, HIDDEN, MAX_LEN = 96, 32, 96
B, TILE, PAGE = 16, 8, 8
FLAGS = {
    "tile_size": TILE,
    "state_block_size": B,
    "page_size": PAGE,
    "max_model_len": MAX_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_slots": 34,
    "num_pages": 40,
    "debug_state": True,
    "warmup": False,
    "prompt_lookup_min": 1,
}
CONFIG = HybridConfig(
    family="test",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    norm_eps=1e-5,
    pattern="M*-M",
    mtp_pattern="*-",
    mamba=MambaConfig(num_heads=4, head_dim=8, state_size=12, num_groups=2, conv_width=4),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, input_size=HIDDEN),
    mlp=MLPConfig(intermediate_size=40, activation="relu2", gated=False),
)
SOURCES = {"none": None, "ngram": NGramDrafts(1, 4), "mtp": MTPDrafts(), "keep": MTPCache()}
DRAFTS = {
    "none": {},
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 2},
    "mtp": {"speculative_method": "mtp", "num_speculative_tokens": 2},
    "keep": {"keep_draft_kv": True},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


@functools.cache
def model(seed: int = 3) -> HybridModel:
    """Random weights under which what was absorbed long ago still matters."""
    graph, state = nnx.split(nnx.eval_shape(lambda: HybridModel(CONFIG, rngs=nnx.Rngs(0))))
    rng, filled = np.random.default_rng(seed), []
    for path, leaf in nnx.to_flat_state(state):
        full = ".".join(map(str, path))
        value = initial_values(full, leaf.shape, rng.standard_normal, rng.random)
        if full.endswith("dt_bias"):
            value = value + 2.5
        if full.lower().endswith("a_log"):
            value = value - 2.5
        filled.append((path, leaf.replace(jnp.asarray(value, leaf.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


@functools.cache
def programs(source: str) -> StepPrograms:
    """Step programs of one draft source. LLVM's optimizations would take longer than what they save."""
    options = {"xla_backend_optimization_level": 0}
    return StepPrograms(model(), tile_size=TILE, source=SOURCES[source], compiler_options=options)


@functools.cache
def points():
    """Programs for points, shared by all workers of this arrangement."""
    from serving.disagg.point import PointPrograms

    return PointPrograms()


def build(mode: str | None = "all", source: str = "none", **flags):
    """An engine whose steps have one shape each."""
    config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | DRAFTS[source] | flags))
    shared = programs(source) if config.tensor_parallel_size == 1 else None
    built = assemble(config, model(), programs=shared)
    built.engine.loop.batches.decode_shapes = [4]
    built.engine.loop.batches.prefill_shapes = [PrefillShape(tokens=64, rows=4, tiles=16)]
    return built


def worker(built, transport: str = "here") -> Worker:
    found = Worker.of(built, {"direct": DirectTransport(transport)}, model=digest())
    if found.arrangement == Arrangement():
        found.programs = points()
    return found


@functools.cache
def digest() -> str:
    return model_digest(model(), CONFIG)


@pytest.fixture(autouse=True)
def _nothing_offered_before():
    """What a test leaves with the transport, a planted fault's for example, is not there for the next."""
    DirectTransport("here").offered.clear()


class Pair:
    """A prefill engine and a decode engine, driven in turn by one thread."""

    def __init__(self, mode="all", source="none", *, prefill=None, decode=None, prefill_source=None, **sides):
        if prefill_source is None:
            prefill_source = "keep" if source == "mtp" else "none"
        self.prefill = build(mode, prefill_source, **(prefill or {})).engine
        self.decode = build(mode, source, **(decode or {})).engine
        self.prefill_side = PrefillSide(worker(self._built(self.prefill, mode, prefill_source, prefill)))
        self.decode_side = DecodeSide(
            worker(self._built(self.decode, mode, source, decode)), fail=self.decode.fail, **sides
        )
        self.peer = DirectPeer(self.prefill_side)
        self.count = 0

    @staticmethod
    def _built(engine, mode, source, flags):
        """What `Worker.of` looks at, around an engine that is there already."""
        from types import SimpleNamespace

        config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | DRAFTS[source] | (flags or {})))
        size = SimpleNamespace(max_model_len=MAX_LEN)
        return SimpleNamespace(engine=engine, model=model(), config=config, size=size)

    def compute(self, prompt, handoff="full") -> Ticket:
        """The prefill side's part; ends with a state that waits."""
        fed = fed_tokens(prompt, handoff)
        if not fed:
            return ticket_of(self.prefill_side, None, prompt, handoff, worker="direct")
        export = self.prefill_side.begin()
        output = self.prefill.add_request(self.name(), {"prompt_token_ids": fed}, ONCE, export=export)
        finish(self.prefill)
        cached = output.num_cached_tokens
        return ticket_of(self.prefill_side, export, prompt, handoff, worker="direct", cached_tokens=cached)

    def add(self, prompt, ticket: Ticket | None, params=GREEDY, **more):
        remote = self.decode_side.accept(self.peer, ticket) if ticket is not None else None
        return self.decode.add_request(self.name(), {"prompt_token_ids": list(prompt)}, params, remote=remote, **more)

    def run(self, prompt, handoff="full", params=GREEDY):
        """A whole request; its output."""
        output = self.add(prompt, self.compute(prompt, handoff), params)
        finish(self.decode)
        return output

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def assert_idle(self):
        """Nothing is in use on either side, and nothing waits to be fetched."""
        for engine in (self.prefill, self.decode):
            engine.loop.scheduler.check(idle=True)
        stats = self.prefill_side.stats
        assert (self.prefill_side.kept, stats.held, stats.copies, stats.copied_bytes) == (0, 0, 0, 0)
        for transport in self.prefill_side.worker.transports.values():
            assert not transport.offered


def finish(engine) -> None:
    """Run until nothing is left to do, the last step in flight included."""
    for _ in range(3000):
        if not engine.loop.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


@functools.cache
def alone(prompt: tuple[int, ...], count: int = 12):
    """Tokens and the gaps between the two likeliest, by an engine without cache, drafts and split."""
    engine = build("none").engine
    params = dataclasses.replace(GREEDY, max_tokens=count)
    output = engine.add_request("alone", {"prompt_token_ids": list(prompt)}, params)
    finish(engine)
    choice = output.outputs[0]
    gaps = []
    for table in choice.logprobs:
        best = sorted((entry.logprob for entry in table.values()), reverse=True)
        gaps.append(best[0] - best[1])
    logprobs = [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
    return list(choice.token_ids), logprobs, gaps


def assert_as_alone(prompt, output, what="", count=12):
    """Log-probabilities as without a split, and tokens up to where two of them all but tie."""
    tokens, logprobs, gaps = alone(tuple(prompt), count)
    choice = output.outputs[0]
    assert choice.finish_reason == "length", (what, choice.finish_reason, choice.stop_reason)
    assert len(choice.token_ids) == len(tokens), what
    for at, token in enumerate(choice.token_ids):
        if token != tokens[at] and gaps[at] < 1e-4:
            return
        assert token == tokens[at], (what, at, choice.token_ids, tokens)
        assert abs(choice.logprobs[at][token].logprob - logprobs[at]) < 1e-4, (what, at)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


def tokens(seed: int, count: int) -> list[int]:
    """A fixed sequence: longer ones begin with shorter ones."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]
