"""Each API key has a prefix cache of its own, unless it is shared, and is a client of the scheduler."""

import contextlib

import pytest
from starlette.datastructures import Headers

from serving.api.http.connection.keys import has_several_keys, salt_of
from serving.api.http.settings import ServerSettings
from serving.core.cache.content import client_salt
from tests.support.fleets.split_pair import letter_engine
from tests.support.servers.live_server import completed, in_process

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
    assert len({client_salt(salt, key) for salt in (None, "", "a", "b", ":a") for key in ("a", "b", "a:", "ab")}) == 20
    settings = ServerSettings.create(api_key=KEYS)
    given = KEYS, KEYS[:1] * 2, ()
    assert [has_several_keys(ServerSettings.create(api_key=keys)) for keys in given] == [True, False, False]
    assert salt_of("a", Headers({"x-api-key": KEYS[0]}), settings) == client_salt("a", KEYS[0])
    assert KEYS[0] not in client_salt("a", KEYS[0])


def test_the_scheduler_knows_the_client_of_each_choice(monkeypatch):
    """So that no client holds up another: tests/serving/core/test_client_shares.py."""
    engine, clients = letter_engine(), []
    add = engine.loop.scheduler.add
    monkeypatch.setattr(engine.loop.scheduler, "add", lambda request: clients.append(request.client) or add(request))
    with in_process(engine, api_key=KEYS) as client:
        for key in (*KEYS, KEYS[0]):
            completed(client, [[3, 4], [5, 6]], headers={"authorization": f"Bearer {key}"}, n=2)
    first, second = clients[0], clients[4]
    assert clients == [first] * 4 + [second] * 4 + [first] * 4
    assert len({first, second, None}) == 3
