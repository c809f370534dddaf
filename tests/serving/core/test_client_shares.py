"""With k active clients, each gets 1/k of what it would get alone, and its short prompt begins within two steps.

The durations of steps are those of a simple machine: a step takes a time of its own, and more for each row and token.
"""

import statistics
from dataclasses import dataclass

import pytest

from serving.core.planning.plan import StepPlan
from serving.core.requests.request import Request
from serving.engine.requests.adapter_reads import CLIENT_SHARE
from tests.serving.core.drive import Loop

ROWS = 32


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: `step`, and for each decode row and prompt token in addition."""

    step: float
    row: float
    token: float
    attacker: float = 0.0
    """In addition, if a row of the attacker decodes: its rows sample, and the victim's does not."""
    load: float = 0.0
    """Of writing an adapter that a new request brings, in addition to the step in which it begins."""

    def seconds(self, plan: StepPlan) -> float:
        samples = any(row.request.client == "attacker" for row in plan.decode)
        loads = self.load * sum(request.adapter is not None for request in plan.admitted)
        prompts = self.token * sum(row.num_tokens for row in plan.prefill)
        return self.step + self.row * len(plan.decode) + prompts + self.attacker * samples + loads


CPU = Machine(step=1.0, row=0.5, token=0.1, load=0.1)
GPU = Machine(step=10.0, row=0.01, token=0.01, load=1.0)


class Server:
    """Steps on a machine, with the time between the tokens of one request, the victim."""

    def __init__(self, machine: Machine, **changes) -> None:
        sizes = {"num_slots": 100, "num_pages": 1000, "max_num_seqs": ROWS, "max_num_batched_tokens": 256}
        self.loop = Loop(
            **{**sizes, "max_model_len": 2000, "page_size": 8, "state_block_size": 32, "tile_size": 16,
               "max_decode_pause": 30.0, "cache_mode": "none", **changes},
        )  # fmt: skip
        self.machine, self.now, self.prompts, self.next_load = machine, 0.0, 0, 0.0
        self.fed: dict[str | None, int] = {}

    def ask(self, client: str, length: int = 4, max_tokens: int = 1500, **more) -> Request:
        self.prompts += 1
        prompt = [(self.prompts * 7 + at * at) % 9 for at in range(length)]
        return self.loop.add(prompt, max_tokens=max_tokens, client=client, **more)

    def step(self) -> StepPlan:
        plan = self.loop.step()
        assert plan is not None
        seconds = self.machine.seconds(plan)
        self.now += seconds
        self.loop.scheduler.observe(plan, seconds)
        for row in plan.prefill:
            self.fed[row.request.client] = self.fed.get(row.request.client, 0) + row.num_tokens
        return plan

    def gaps(self, victim: Request, steps: int, attack=lambda: None) -> list[float]:
        """The time between two tokens of the victim, in so many steps."""
        found, last = [], self.now
        for _ in range(steps):
            attack()
            if any(row.request is victim for row in self.step().decode):
                found.append(self.now - last)
                last = self.now
        return found


def many_choices(server: Server) -> None:
    if not any(each.client == "attacker" for each in server.loop.scheduler.queues.unfinished.values()):
        for _ in range(2 * ROWS):
            server.ask("attacker", 3)


def chats(server: Server) -> None:
    while sum(each.client == "attacker" for each in server.loop.scheduler.queues.unfinished.values()) < 12:
        server.ask("attacker", 40, 4)


def dropped_prompts(server: Server) -> None:
    """Long prompts that end in the middle of their prefill, and come again."""
    scheduler = server.loop.scheduler
    for request in list(scheduler.queues.unfinished.values()):
        if request.client == "attacker" and request.progress.num_computed > 200:
            scheduler.abort(request.request_id)
    while sum(each.client == "attacker" for each in scheduler.queues.unfinished.values()) < 8:
        server.ask("attacker", 1000, 1)


def rotating_adapters(server: Server) -> None:
    """Requests that each bring an adapter that is not on the device. Reads take no longer than a step here, so their
    pauses (`AdapterReads`) are what bounds the loads."""
    if server.now >= server.next_load:
        server.next_load = server.now + server.machine.step / CLIENT_SHARE
        server.ask("attacker", 8, 4, adapter=f"adapter {server.prompts}")


@pytest.mark.smoke("attack")
@pytest.mark.parametrize("attack", [many_choices, chats, dropped_prompts, rotating_adapters])
@pytest.mark.parametrize(("machine", "fresh"), [(CPU, False), (CPU, True), (GPU, False)])
def test_a_stream_keeps_its_part_of_the_time(machine: Machine, fresh: bool, attack) -> None:
    """During an attack, a stream has 0.8 of its fair part, and gaps of three times those that it has alone, at most.

    `fresh`: the attack comes first, so that the server has never seen the stream alone.
    """
    server = Server(machine)
    victim = server.ask("victim")
    alone = server.gaps(victim, 100)[10:]
    if fresh:
        server = Server(machine)
        server.gaps(victim, 60, lambda: attack(server))
        victim = server.ask("victim")
    gaps = server.gaps(victim, 300, lambda: attack(server))[50:]
    assert sum(gaps) / len(gaps) <= 2 * statistics.mean(alone) / 0.8
    assert sorted(gaps)[-len(gaps) // 100] <= 3 * max(alone)


def test_a_stream_keeps_its_part_if_each_row_of_another_client_is_expensive() -> None:
    server = Server(Machine(step=1.0, row=0.5, token=0.1, attacker=20.0))
    victim = server.ask("victim")
    server.gaps(victim, 50)
    gaps = server.gaps(victim, 500, lambda: many_choices(server))[50:]
    assert sum(gaps) / len(gaps) <= 2 * 1.5 / 0.8
    outputs = [each.output_token_ids for each in server.loop.scheduler.queues.running if each.client == "attacker"]
    assert sum(map(len, outputs)) > 20, "it has its part, too"


def test_steps_leave_time_for_what_requests_take_outside_of_them() -> None:
    """A tenth of a client's part may pass between steps without that it takes longer than its part."""
    server = Server(CPU)
    victim = server.ask("victim")
    part = 2 * statistics.mean(server.gaps(victim, 100)[10:])
    gaps = server.gaps(victim, 500, lambda: many_choices(server))[50:]
    assert statistics.mean(gaps) + 0.1 * part <= part


def test_a_machine_on_which_rows_cost_nothing_decodes_all_of_them() -> None:
    server = Server(GPU)
    victim = server.ask("victim")
    server.gaps(victim, 50)
    many_choices(server)
    server.gaps(victim, 100)
    assert len(server.step().decode) == ROWS


def test_rows_of_a_client_take_turns() -> None:
    server = Server(CPU)
    victim = server.ask("victim")
    server.gaps(victim, 20)
    many_choices(server)
    server.gaps(victim, 200)
    lengths = [len(each.output_token_ids) for each in server.loop.scheduler.queues.running if each.client == "attacker"]
    assert len(lengths) == ROWS - 1
    assert max(lengths) - min(lengths) <= 2 + max(lengths) // 4
    assert len(victim.output_token_ids) > 200


@pytest.mark.parametrize("lengths", [(1000, 1000), (1000, 60), (300, 20)])
def test_prompt_tokens_are_divided_equally(lengths: tuple[int, int]) -> None:
    server = Server(CPU, max_decode_pause=None)
    for _ in range(60):
        for client, length in zip("ab", lengths, strict=True):
            while sum(each.client == client for each in server.loop.scheduler.queues.unfinished.values()) < 20:
                server.ask(client, length, 1)
        server.step()
    assert 0.8 <= server.fed["a"] / server.fed["b"] <= 1.25


def test_each_client_has_its_turn_where_a_step_takes_one_prompt() -> None:
    """Steps have quotas for two clients, or rows for two, or for one prompt, while three have prompts."""
    for tokens, rows, max_tokens in ((4, 3, 1), (2, 4, 1), (2, 2, 4), (4, 2, 4)):
        loop = Loop(max_num_batched_tokens=tokens, max_prefill_rows=1, max_num_seqs=rows, cache_mode="none")
        last = dict.fromkeys("abc", 0)
        for step in range(300):
            for client in last:
                while sum(each.client == client for each in loop.scheduler.queues.unfinished.values()) < 3:
                    loop.add([step % 9] * 8, max_tokens=max_tokens, client=client)
            plan = loop.step()
            assert plan is not None
            last |= dict.fromkeys((row.request.client for row in plan.prefill), step)
            assert min(last.values()) >= step - 40, last


@pytest.mark.parametrize("pages", [1000, 35])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_short_prompt_begins_within_two_steps(machine: Machine, pages: int) -> None:
    """All rows, or most pages, belong to another client, whose prompts wait, too."""
    server = Server(machine, num_pages=pages, max_model_len=200)
    many_choices(server)
    for _ in range(40):
        server.step()
    for number in range(6):
        for _ in range(3):
            server.ask("attacker", 100, 60)
        short = server.ask("victim", 5, 3)
        server.step()
        server.step()
        assert short.progress.num_sampling_steps or short.progress.unsettled or short.finished, number
        while not short.finished:
            server.step()


def test_one_client_is_served_as_before_whatever_others_did() -> None:
    """Debts of a client that is alone again do not hold up its prompts."""
    server = Server(CPU)
    victim = server.ask("victim")
    server.gaps(victim, 30)
    server.gaps(victim, 50, lambda: dropped_prompts(server))
    server.loop.scheduler.abort(victim.request_id)
    for request in list(server.loop.scheduler.queues.unfinished.values()):
        server.loop.scheduler.abort(request.request_id)
    long = server.ask("attacker", 1000, 1)
    server.loop.steps(4)  # the first one settles the last step
    assert long.progress.num_computed or long.finished
