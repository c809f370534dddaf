"""A server with two API keys: what one key sends does not hold up the other, counted in steps."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.config import EngineConfig
from serving.core import Scheduler, StepPlan
from serving.engine.assembly.build import assemble
from tests.support.engines.step_programs import NoPrograms
from tests.support.fleets.split_pair import FLAGS, model
from tests.support.models.letter_tokens import letters
from tests.support.servers.live_server import in_process

FLOODS = {
    "choices": {"prompt": [[9, 8, number] for number in range(3, 11)], "n": 8, "max_tokens": 40},
    "long prompts": {"prompt": [[3 + number % 16] * 70 for number in range(64)], "max_tokens": 30},
}


class Record:
    """The steps in which requests of the second key arrived and first had a row, and the clients of each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.arrived, self.began, self.clients = scheduler, [], [], []
        self._add, self._dispatched = scheduler.add, scheduler.dispatched
        scheduler.add, scheduler.dispatched = self.add, self.dispatched  # type: ignore[method-assign]

    def add(self, request) -> None:
        self._add(request)
        if request.user.parent.output.prompt_token_ids == [5, 6, 7]:
            self.arrived.append((request, self.scheduler.num_steps))

    def dispatched(self, plan: StepPlan) -> None:
        self._dispatched(plan)
        self.clients.append({row.request.client for row in plan.rows})
        for request, _ in self.arrived[len(self.began) :]:
            if any(row.request is request for row in plan.rows):
                self.began.append(plan.step)


@pytest.mark.parametrize("flood", FLOODS)
def test_a_short_prompt_of_another_key_begins_within_two_steps(flood):
    config = EngineConfig.create(mamba_cache_mode="all", **FLAGS | {"debug_state": False, "max_num_seqs": 4})
    built = assemble(config, model(), programs=NoPrograms(), tokenizer=letters())
    record = Record(built.engine.loop.scheduler)

    def ask(key: str, body: dict) -> int:
        sent = {"temperature": 0, "ignore_eos": True, **body}
        return client.post("/v1/completions", json=sent, headers={"authorization": f"Bearer {key}"}).status_code

    serving = in_process(built.engine, api_key=("first", "second"))
    with serving as client, ThreadPoolExecutor(1) as threads:
        attack = threads.submit(ask, "first", FLOODS[flood])
        while len(record.scheduler.running) < 4 and not attack.done():
            pass
        codes = [ask("second", {"prompt": [5, 6, 7], "max_tokens": 2}) for _ in range(5)]
        assert not attack.done(), "all rows were taken all the time"
        assert attack.result() == 200
    assert codes == [200] * 5
    assert all(began - arrived <= 2 for began, (_, arrived) in zip(record.began, record.arrived, strict=True))
    assert {2} <= {len(clients) for clients in record.clients}
