"""Random traffic through a real engine, judged request by request against plain greedy decoding.

A trace is a number: it decides the model, the cache mode, block size and token budget, who asks what and when, whose
request is aborted, and which steps fail. `run_trace(seed)` raises `Divergence` where an output is not the reference's.
"""

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from serving.core.errors import RequestError
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.state_transfer import source
from tests.serving.core.schedules import run_seeds
from tests.serving.differential.drafting import COUNTS, MOST, SPARE_SLOTS, Drafters, Drafting, Watch, drafters, tally
from tests.serving.differential.judging import Divergence, judge
from tests.serving.differential.splitting import OtherSide, Split, draw_split
from tests.support.engines.engines import Continuation
from tests.support.engines.shared_engines import (
    FLAGS,
    LONGEST,
    MAX_LEN,
    ROWS,
    SAMPLINGS,
    TAGGED,
    TILE,
    TOLERANCE,
    SharedEngines,
    engines_of,
)
from tests.support.models.adapter_contents import CONTENTS, draw_adapters
from tests.support.models.letter_tokens import WORDS
from tests.support.models.tiny_configs import ENGINE_VOCAB

PREFIXES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 48, 49)
TAILS = (0, 0, 1, 3, 10)
MODELS = ("nemotronh", "lightning", "mamba2", "joined", "kimi", "selective")
COUNTED = (
    "preemptions", "withdrawn", "states_evicted", "pages_evicted", "page_copies", "full_hits", "cached_tokens",
    "drafts_cut", "anchors",
)  # fmt: skip
DRAFTING_MODELS = ("nemotronh", "joined")


@dataclass
class Ask:
    """One request of a trace: what is asked, when, and what should come of it."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    expected: list[Continuation]
    """One line for each choice, as long as the reference's; the output may end before."""
    length: int
    """Tokens of the output, unless it is aborted."""
    arrival: int
    """The engine's step at which it comes."""
    sampling: str = "plain"
    """One of `SAMPLINGS`, or "stop text"."""
    priority: int = 0
    salt: str | None = None
    adapter: LoRARequest | None = None
    aborted: int | None = None
    """Steps after its arrival at which it is aborted, if it has not ended by then."""


@dataclass
class Trace:
    """All that a seed decides."""

    seed: int
    model: str
    flags: dict
    mode: str
    asks: list[Ask]
    failing: set[int]
    """Steps whose device fails once they are dispatched."""
    withdrawn: set[int]
    """Steps that cannot be turned into arrays, and are withdrawn."""
    drafting: dict[str, Drafting] | None = None
    """How each request drafts; None: this trace knows no drafts."""
    lost_slots: int = 0
    """Slots that no request can use, so that second sets and checkpoints are scarce."""
    split: Split | None = None
    """Which prompts another engine computes; None: all is done by one."""
    drafters: Drafters | None = None
    """What makes engines whose requests draft."""
    met: Counter = field(default_factory=Counter)


def draw(
    seed: int, *, drafts=False, split=False, replay: int | None = None, model: str = "", mixed=False, adapters=False
) -> Trace:
    """The trace of a seed; computes missing reference outputs.

    `replay`: rows are held by anchors with this interval, in a store with two slots for each. `model`: this one only.
    `mixed`: decode and prefill rows of a step run in one program. `adapters`: most requests have an adapter.
    """
    rng = random.Random(seed)
    drawn = rng.choice(DRAFTING_MODELS if drafts else MODELS)
    model = model or drawn
    if adapters:
        model = f"{model}, adapters"
    on = engines_of(model)
    block = rng.choice([TILE, 2 * TILE, 2 * TILE, 4 * TILE])
    flags = {
        "state_block_size": block,
        "max_num_batched_tokens": rng.choice([12, 16, 24, 40, 64, MAX_LEN]),
        "debug_state": (drafts and model == "nemotronh") or (not drafts and rng.choice(TAGGED.get(model, (False,)))),
    }
    if mixed:
        flags["mixed_steps"] = True
    if rng.random() < 0.1:
        flags["enable_chunked_prefill"] = False
    mode = rng.choice(["none", "align", "align", "all", "all", "all"])
    crowd = rng.choice([2, 4, 8, 12])
    spread = rng.choice([0, 1, 4])
    favorites = [_prompt(rng, on) for _ in range(3)]
    asks, arrival = [], 0
    count = rng.randrange(crowd // 2 + 1, crowd + 1)
    own = draw_adapters(seed, count) if adapters else [None] * count
    for number in range(count):
        prompt = rng.choice(favorites) if rng.random() < 0.4 else _prompt(rng, on)
        asks.append(_ask(rng, on, f"{number}", prompt, arrival, own[number]))
        arrival += rng.randrange(spread + 1)
    length = arrival + 20
    failing = set(rng.sample(range(1, length), rng.choice([0, 0, 0, 1, 2])))
    withdrawn = set(rng.sample(range(1, length), rng.choice([0, 0, 1, 2])))
    trace = Trace(seed, model, flags, mode, asks, failing, withdrawn)
    if drafts:
        sources = drafters(model).sources
        trace.drafting = {
            ask.name: Drafting(rng.choice(sources), rng.choice(COUNTS), rng.randrange(1 << 30)) for ask in asks
        }
        trace.lost_slots = rng.choice([0, SPARE_SLOTS // 2, SPARE_SLOTS - 6])
        trace.drafters = drafters(model, MOST if replay is None else min(MOST, replay // 2 - 1))
    if replay is not None:
        tile = max(TILE, replay)
        slots = ROWS * 2
        sizes = {"state_block_size": max(block, tile), "num_slots": slots, "num_pages": FLAGS["num_pages"]}
        trace.flags |= {"replay_interval": replay, "tile_size": tile, **sizes}
        trace.lost_slots = rng.choice([0, slots - ROWS, slots - 3])
    if split:
        # Last of all: with and without, everything else is the same.
        trace.split = draw_split(rng, [ask.name for ask in asks if ask.params.prompt_logprobs is None])
    return trace


def _prompt(rng: random.Random, on: SharedEngines) -> tuple[int, ...]:
    """One of a few hundred prompts, many of which begin alike; some go on from an answer, as a second turn does."""
    base = _tokens(rng.randrange(2), 64)
    if rng.random() < 0.15:
        first = base[: rng.choice([8, 33])]
        said = on.alone(first)[0].tokens
        return (*first, *said[: rng.choice([7, 8, 15])], *_tokens(7, rng.randrange(2)))
    tail = rng.choice(TAILS)
    return base[: rng.choice(PREFIXES)] + _tokens(10 + tail, tail)


def _tokens(which: int, count: int) -> tuple[int, ...]:
    rng = random.Random(1000 + which)
    return tuple(rng.randrange(ENGINE_VOCAB) for _ in range(count))


def _ask(
    rng: random.Random, on: SharedEngines, name: str, prompt: tuple[int, ...], arrival: int, adapter: LoRARequest | None
) -> Ask:
    seed = rng.randrange(2) if len(prompt) in PREFIXES and rng.random() < 0.25 else None
    # Drawn apart: whatever else a seed decides stays as it was.
    apart = random.Random(f"{name} {arrival} {len(prompt)} {prompt[-1]}")
    sampling = apart.choice([*["plain"] * 5, *list(SAMPLINGS)[1:]])
    if not on.samples:
        seed, sampling = None, "plain"
    expected = on.alone(prompt, seed=seed, sampling=sampling, adapter=adapter)
    most = min(LONGEST, MAX_LEN - len(prompt))
    length = rng.choice([1, 2, 5, rng.randrange(1, most + 1), most])
    length = min(length, most)
    choices = rng.choice([1, 1, 1, 2, 3])
    stops, stop_text = {}, None
    by_token = choices == 1 and length > 2 and rng.random() < 0.2
    if sampling == "held back":
        choices, length, stops = 1, len(expected[0].tokens), SAMPLINGS[sampling]
    elif by_token:
        stop = expected[0].tokens[length // 2]
        length, stops = expected[0].tokens.index(stop) + 1, {"stop_token_ids": [stop]}
    elif choices == 1 and length > 4 and apart.random() < 0.2:
        said = [WORDS[token] for token in expected[0].tokens]
        stop_text = "".join(said[length - 3 : length - 1])
        length, stops = next(n for n in range(1, len(said) + 1) if stop_text in "".join(said[:n])), {"stop": stop_text}
    params = SamplingParams(
        max_tokens=most if stops else length,
        detokenize=stop_text is not None,
        **(SAMPLINGS[sampling] | stops),
        ignore_eos=True,
        n=choices,
        temperature=0.0 if seed is None else 0.9,
        seed=seed,
        logprobs=rng.choice([None, 0, 0, 2]),
        # The reference of prompt log-probabilities is the model without adapters.
        prompt_logprobs=0 if rng.random() < 0.08 and adapter is None else None,
    )
    lines = [expected[i if seed is not None else 0] for i in range(choices)]
    sampling = sampling if stop_text is None else "stop text"
    priority, salt = rng.choice([0, 0, 0, 1, -1]), rng.choice([None, None, None, None, "salt"])
    aborted = rng.randrange(25) if rng.random() < 0.12 else None
    return Ask(name, prompt, params, lines, length, arrival, sampling, priority, salt, adapter, aborted)


def run_trace(seed: int, **how: Any) -> Counter:
    """Run the trace of a seed; returns what it met, `cut` (comparisons cut short by a near-tie) among it.

    `how`: see `draw`.
    """
    trace = draw(seed, **how)
    engine = _engine(trace, trace.mode, trace.drafting, **trace.flags)
    watch = None
    # Keys are those of the whole sequence at once where no state was rounded on the way to them.
    on = engines_of(trace.model)
    if trace.drafters is not None and trace.drafting is not None and on.of_whole == TOLERANCE and not on.adapted:
        watch = Watch(trace.drafters, trace.drafting)
    other = None
    if trace.split is not None:
        never = trace.drafting and {ask.name: Drafting("ngram", 0, 0) for ask in trace.asks}
        flags = trace.flags | trace.split.flags
        if how.get("replay") is not None:
            # The other side has an interval of its own, and blocks of whole tiles.
            flags["state_block_size"] = max(flags["state_block_size"], flags["tile_size"])
            flags["replay_interval"] = random.Random(seed).choice([1, how["replay"]])
        prefill = _engine(trace, trace.split.mode, never, **flags, **({"side": 1} if on.adapted else {}))
        other = OtherSide(on, trace.split, prefill, flags, engine, trace.flags)
    loop = engine.loop
    pool = loop.scheduler.cache.pools[0]
    lost = [pool.take() for _ in range(trace.lost_slots)]
    _break(loop, trace)
    outputs: dict[str, object] = {}
    left = list(trace.asks)
    aborts: list[tuple[int, str]] = []
    for now in range(2000):
        while left and left[0].arrival <= now:
            ask = left[0]
            if not _has_room(engine, ask.adapter):
                trace.met["adapters waited"] += 1
                break
            left.pop(0)
            options = {"priority": ask.priority, "cache_salt": ask.salt, "lora_request": ask.adapter}
            options["remote"] = other.compute(ask) if other is not None else None
            prompt = {"prompt_token_ids": list(ask.prompt)}
            outputs[ask.name] = engine.add_request(ask.name, prompt, ask.params, **options)
            trace.met[CONTENTS[int(ask.adapter.lora_path)] if ask.adapter else "no adapter"] += 1
            if ask.aborted is not None:
                aborts.append((now + ask.aborted, ask.name))
        for due, name in aborts:
            if due == now:
                trace.met["aborted"] += engine.abort(name) is not None
        if not left and not loop.busy and (other is None or other.done):
            break
        engine.step()
        if watch is not None:
            watch.look(loop)
        if other is not None:
            other.move()
        loop.scheduler.check()
    else:
        raise AssertionError("the engine does not come to an end")
    for slot in lost:
        pool.release(slot)  # (after a failure, of a pool that is gone)
    loop.scheduler.check(idle=True)
    for ask in trace.asks:
        judge(trace, ask, outputs[ask.name])
        trace.met[ask.sampling] += 1
        trace.met[f"{ask.sampling}, preempted"] += outputs[ask.name].metrics.num_preemptions > 0
    if trace.drafting is not None:
        tally(trace.met, trace.drafting, outputs)
    if watch is not None:
        trace.met["layer"] += watch.count
        if wrong := watch.wrong():
            raise Divergence(f"seed {trace.seed} ({trace.model}, {trace.mode}, {trace.flags}): {wrong[0]}")
    if other is not None:
        trace.met += other.close()
    stats = loop.scheduler.stats()
    trace.met.update({name: stats[name] for name in COUNTED})
    met = {"failures": loop.stats.failures, "debug": trace.flags["debug_state"], "mixed": loop.stats.mixed_steps}
    trace.met.update((trace.mode, trace.model), **met)
    return trace.met


def run_traces(
    first: int, count: int, *, reached: Sequence[str] = (), ties: float = 1 / 200, **how: Any
) -> Counter[str]:
    """Runs traces from a seed on, and checks what they met together. `ties`: of comparisons that near-ties may cut."""
    with mock.patch.object(source, "PATIENCE", 0.0):  # no engine waits for an arrival: they come between its steps
        met = run_seeds(functools.partial(run_trace, **how), range(first, first + count), reached)
    assert met["cut"] <= 1 + met["comparisons"] * ties, "too many comparisons were cut short by near-ties"
    assert met["accepted wrong"] == 0
    return met


def _has_room(engine, adapter: LoRARequest | None) -> bool:
    """Whether an engine can take a request with this adapter now. Loads it."""
    if adapter is None:
        return True
    try:
        engine.adapters.release(engine.adapters.take(adapter))
    except RequestError:  # unfinished requests use all entries
        return False
    return True


def _engine(trace: Trace, mode: str, drafting: dict[str, Drafting] | None, **flags):
    if drafting is None or trace.drafters is None:
        return engines_of(trace.model).engine(mode, **flags)
    # What the drafts of each choice would be, by its request id.
    scripts = {
        f"{ask.name}#{i}" if i else ask.name: trace.drafting[ask.name].script(ask.prompt, line)
        for ask in trace.asks
        for i, line in enumerate(ask.expected)
    }
    return trace.drafters.engine(mode, drafting, scripts, **flags)


def _break(loop, trace: Trace) -> None:
    """Make the steps fail that shall: after dispatch as a lost device does, before it as a bug in a batch would."""
    dispatched, tried = itertools.count(1), set()

    def fault(plan) -> None:
        if next(dispatched) in trace.failing:
            raise RuntimeError("injected: the device is lost")

    loop.fault = fault
    for kind in ("decode", "prefill"):
        fill = getattr(loop.batches, kind)

        def unlucky(rows, fill=fill):
            # Once: the loop then tries the rows one by one, and blames none.
            if rows[0].step in trace.withdrawn - tried:
                tried.add(rows[0].step)
                raise ValueError("injected: no batch can be made of this")
            return fill(rows)

        setattr(loop.batches, kind, unlucky)
