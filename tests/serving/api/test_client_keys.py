"""Each API key has a prefix cache of its own, unless it is shared, and does not hold up another, counted in steps."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.datastructures import Headers

from serving.api.http.connection.keys import has_several_keys, salt_of
from serving.api.http.settings import ServerSettings
from serving.core.cache.content import client_salt
from serving.core.planning.plan import StepPlan
from serving.core.scheduler import Scheduler
from tests.support.fleets.split_pair import letter_engine
from tests.support.servers.live_server import in_process

PROMPT = list(range(3, 45))
KEYS = ("first-key", "second-key")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def serve():
    """Makes clients of a server with some flags; `ask(key, salt)` gives the cached tokens of a prompt."""
    opened = contextlib.ExitStack()

    def make(**flags):
        client = opened.enter_context(in_process(letter_engine(TEMPLATE), **flags))

        def ask(key, salt=None, header="authorization", path="completions"):
            words = {"messages": [{"role": "user", "content": "a b c " * 12}]}
            body = {"prompt": PROMPT} if path == "completions" else words
            body |= {"max_tokens": 2} | ({} if salt is None else {"cache_salt": salt})
            sent = {} if key is None else {header: f"Bearer {key}" if header == "authorization" else key}
            answer = client.post(f"/v1/{path}", json=body, headers=sent)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or {"cached_tokens": usage.get("cache_read_input_tokens", 0)}
            return details["cached_tokens"]

        return ask

    with opened:
        yield make


def test_keys_are_separated(serve):
    ask = serve(api_key=KEYS)
    assert [ask(KEYS[0]), ask(KEYS[1]), ask(KEYS[0]), ask(KEYS[1])] == [0, 0, len(PROMPT), len(PROMPT)]
    assert ask(KEYS[0], header="x-api-key") == len(PROMPT), "it is the same key"
    # The same salt under another key is another one.
    assert [ask(KEYS[0], "salt"), ask(KEYS[1], "salt"), ask(KEYS[0], "salt")] == [0, 0, len(PROMPT)]
    assert ask(KEYS[1], client_salt(None, KEYS[0])) == 0, "no salt of a client's gives another's"


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_every_endpoint_separates(serve, path):
    ask = serve(api_key=KEYS)
    assert [ask(key, path=path) > 0 for key in (KEYS[0], KEYS[1], KEYS[0])] == [False, False, True]


@pytest.mark.parametrize("flags", [{"api_key": KEYS, "share_prefix_cache": True}, {"api_key": KEYS[:1]}, {}])
def test_one_cache_where_there_is_one_client_or_sharing_is_asked_for(serve, flags):
    ask = serve(**flags)
    several = flags.get("api_key", [None])
    assert [ask(several[0]), ask(several[-1])] == [0, len(PROMPT)]
    assert [ask(several[0], "salt"), ask(several[-1], "salt")] == [0, len(PROMPT)]


def test_a_client_salt_is_that_of_one_key_and_one_salt():
    seen = {client_salt(salt, key) for salt in (None, "", "a", "b", ":a") for key in ("a", "b", "a:", "ab")}
    assert len(seen) == 20
    settings = ServerSettings.create(api_key=KEYS)
    given = KEYS, KEYS[:1] * 2, ()
    assert [has_several_keys(ServerSettings.create(api_key=keys)) for keys in given] == [True, False, False]
    assert salt_of("a", Headers({"x-api-key": KEYS[0]}), settings) == client_salt("a", KEYS[0])
    assert KEYS[0] not in client_salt("a", KEYS[0])


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
    engine = letter_engine(max_num_seqs=4)
    record = Record(engine.loop.scheduler)

    def ask(key: str, body: dict) -> int:
        sent = {"temperature": 0, "ignore_eos": True, **body}
        return client.post("/v1/completions", json=sent, headers={"authorization": f"Bearer {key}"}).status_code

    serving = in_process(engine, api_key=("first", "second"))
    with serving as client, ThreadPoolExecutor(1) as threads:
        attack = threads.submit(ask, "first", FLOODS[flood])
        while len(record.scheduler.queues.running) < 4 and not attack.done():
            pass
        codes = [ask("second", {"prompt": [5, 6, 7], "max_tokens": 2}) for _ in range(5)]
        assert not attack.done(), "all rows were taken all the time"
        assert attack.result() == 200
    assert codes == [200] * 5
    assert all(began - arrived <= 2 for began, (_, arrived) in zip(record.began, record.arrived, strict=True))
    assert {2} <= {len(clients) for clients in record.clients}
