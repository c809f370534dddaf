"""A pair of engines in one process, over shared programs: one computes prompts, the other goes on from them."""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import jax

from mamba_jax.model import HybridModel
from mamba_jax.programs import StepPrograms
from mamba_jax.store import StoreShape
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.assembly.drafting import draft_source
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.batching import PrefillShape
from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import ONCE, PrefillSide, fed_tokens
from serving.split.transports import TransportError
from serving.split.wire import Ticket
from serving.split.worker import Worker
from serving.state_transfer.identity import model_digest
from serving.state_transfer.programs import Arrangement, PointPrograms, num_bytes
from tests.support.engines.engines import Continuation, finish
from tests.support.engines.step_programs import NoPrograms, shared_programs
from tests.support.models.letter_tokens import EOS, letters
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import ENGINE_VOCAB, FOR_ENGINES

B, TILE, MAX_LEN = 16, 8, 96
FLAGS = {
    "tile_size": TILE, "state_block_size": B, "page_size": 8, "max_model_len": MAX_LEN, "max_num_seqs": 4,
    "max_num_batched_tokens": 48, "num_slots": 34, "num_pages": 40, "debug_state": True, "warmup": False,
    "prompt_lookup_min": 1, "replay_interval": 1,
}  # fmt: skip
CONFIG = FOR_ENGINES["nemotronh"]
DRAFTERS = {name: FOR_ENGINES[name] for name in ("dflash", "eagle3")}
"""Models with a drafter whose keys and values have another shape than the model's."""
DRAFTS = {
    "none": {},
    "ngram": {"speculative_method": "ngram", "num_speculative_tokens": 2},
    "mtp": {"speculative_method": "mtp", "num_speculative_tokens": 2},
    "keep": {"keep_draft_kv": True},
    **{name: {"speculative_method": name, "num_speculative_tokens": 2} for name in DRAFTERS},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
_SHARED: dict[str, dict[int, list[jax.Array]]] = {}
_ADDRESSES = itertools.count()


class DirectTransport:
    """Passes arrays without copying."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.offered: dict[int, list[jax.Array]] = _SHARED.setdefault(address, {})

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        self.offered[key] = list(arrays)

    def drain(self, key: int, *, taken: bool = False) -> None:
        self.offered.pop(key, None)

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        arrays = _SHARED.get(address, {}).pop(key, None)
        if arrays is None:
            raise TransportError(f"no arrays under key {key} at {address!r}")
        return arrays

    def close(self) -> None:
        _SHARED.pop(self.address, None)


class DelayedExecutor:
    """Does some of its work whenever it is asked to, in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.jobs = rng, []

    def submit(self, function, *arguments) -> None:
        self.jobs.append((function, arguments))

    def run(self, share: float = 1.0) -> None:
        """Each job is done with this probability."""
        self.rng.shuffle(self.jobs)
        now, later = [], []
        for job in self.jobs:
            (now if self.rng.random() < share else later).append(job)
        self.jobs = later
        for function, arguments in now:
            function(*arguments)


def model(seed: int = 3, source: str = "none") -> HybridModel:
    """Random weights, the same for the same seed."""
    return long_memory_model(DRAFTERS.get(source, CONFIG), seed)


@functools.cache
def programs(source: str) -> StepPrograms:
    """Step programs of one draft source."""
    drafted = model(source=source)
    config = EngineConfig.create(**FLAGS, **DRAFTS[source])
    return shared_programs(drafted, tile_size=TILE, source=draft_source(config, drafted.config))


@functools.cache
def points():
    """Programs for points, shared by all workers of this arrangement."""
    return PointPrograms(Arrangement(StoreShape.of(CONFIG)))


def build(mode: str | None = "all", source: str = "none", **flags):
    """An engine whose steps have one shape each."""
    config = EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | DRAFTS[source] | flags))
    alone = config.tensor_parallel_size == config.context_parallel_size == 1
    shared = programs(source) if alone else None
    texts = {"tokenizer": letters(), "eos_token_ids": (EOS,)} if config.enable_structured_outputs else {}
    built = assemble(config, model(source=source), programs=shared, **texts)
    built.engine.loop.batches.decode_shapes = [4]
    built.engine.loop.batches.prefill_shapes = [PrefillShape(tokens=64, rows=4, tiles=16)]
    return built


def letter_engine(template: str | None = None, **flags):
    """An engine for texts whose programs emit one token for ever."""
    config = EngineConfig.create(mamba_cache_mode="all", **FLAGS | {"debug_state": False} | flags)
    tokenizer = letters() if template is None else letters().with_chat_template(template)
    return assemble(config, model(), programs=NoPrograms(), tokenizer=tokenizer).engine


def worker(built) -> Worker:
    # What a test leaves with the transport, a planted fault's for example, is not there for the next.
    found = Worker(built, {"direct": DirectTransport(str(next(_ADDRESSES)))}, model=digest())
    if found.arrangement == points().arrangement:
        found.programs = points()
    return found


@functools.cache
def digest() -> str:
    return model_digest(model(), CONFIG)


class Pair:
    """A prefill engine and a decode engine, driven in turn by one thread."""

    def __init__(self, mode="all", source="none", *, prefill=None, decode=None, **sides):
        prefill_source = "keep" if source == "mtp" else source if source in DRAFTERS else "none"
        there, here = build(mode, prefill_source, **(prefill or {})), build(mode, source, **(decode or {}))
        self.connect(PrefillSide(worker(there)), DecodeSide(worker(here), **sides))

    def connect(self, there: PrefillSide, here: DecodeSide) -> None:
        """The sides of two engines that are there already."""
        self.prefill_side, self.decode_side = there, here
        self.prefill, self.decode = there.worker.engine, here.worker.engine
        self.peer, self.count = there, 0

    def compute(self, prompt, handoff="full", salt=None, lora=None, marks=()) -> Ticket:
        """The prefill side's part; ends with a state that waits."""
        fed = fed_tokens(prompt, handoff)
        if not fed:
            return self.prefill_side.ticket(None, prompt, handoff)
        export = self.prefill_side.begin()
        more = {"cache_salt": salt, "lora_request": lora, "export": export, "cache_marks": marks}
        output = output_of(self.prefill, fed, ONCE, **more)
        counts = {"cached_tokens": output.num_cached_tokens, "written_tokens": [*output.cache_write_tokens.items()]}
        name = None if lora is None else lora.lora_name
        return self.prefill_side.ticket(export, prompt, handoff, adapter_name=name, **counts)

    def add(self, prompt, ticket: Ticket | None, params=GREEDY, **more):
        self.count += 1
        name, remote = f"r{self.count}", self.remote(ticket) if ticket is not None else None
        return self.decode.add_request(name, {"prompt_token_ids": list(prompt)}, params, remote=remote, **more)

    def remote(self, ticket: Ticket):
        """What a request waits for that goes on from a ticket's state."""
        return self.decode_side.accept(self.peer, ticket)

    def run(self, prompt, handoff="full", ticket=None):
        """A whole request, from the state of a ticket if one is given; its output."""
        output = self.add(prompt, ticket or self.compute(prompt, handoff))
        finish(self.decode)
        return output

    @property
    def state_bytes(self) -> int:
        """Of one state, as it travels."""
        return num_bytes(self.decode_side.worker.state.values())

    def assert_idle(self):
        """Nothing is in use on either side, and nothing waits to be fetched."""
        for engine in (self.prefill, self.decode):
            engine.loop.scheduler.check(idle=True)
        stats = self.prefill_side.stats
        assert (self.prefill_side.kept, stats.held, stats.copies, stats.copied_bytes) == (0, 0, 0, 0)
        for transport in self.prefill_side.worker.transports.values():
            assert not transport.offered


def output_of(engine, prompt, params=GREEDY, **more):
    """Runs a request from beginning to end on an engine; its output."""
    output = engine.add_request("only one", {"prompt_token_ids": list(prompt)}, params, **more)
    finish(engine)
    return output


@functools.cache
def alone(prompt: tuple[int, ...]) -> Continuation:
    """What comes after a prompt, by an engine without cache, drafts and split."""
    return Continuation.of(output_of(build("none").engine, prompt).outputs[0])


def assert_as_alone(prompt, output, what=""):
    """Log-probabilities as without a split, and tokens up to where two of them all but tie."""
    expected = alone(tuple(prompt))
    choice = output.outputs[0]
    assert choice.finish_reason == "length", (what, choice.finish_reason, choice.stop_reason)
    assert len(choice.token_ids) == len(expected.tokens), what
    for at, token in enumerate(choice.token_ids):
        if token != expected.tokens[at] and expected.gaps[at] < 1e-4:
            return
        assert token == expected.tokens[at], (what, at, choice.token_ids, expected.tokens)
        assert abs(choice.logprobs[at][token].logprob - expected.logprobs[at]) < 1e-4, (what, at)


def tokens(seed: int, count: int) -> list[int]:
    """A fixed sequence: longer ones begin with shorter ones."""
    rng = random.Random(seed)
    return [rng.randrange(ENGINE_VOCAB) for _ in range(count)]
