"""Two workers of each kind, killed at random while requests run: right tokens or a clear error, and nothing leaks."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.processes import router, streamed, worker

pytestmark = pytest.mark.slow

REQUESTS, AT_ONCE, KILLS = 200, 6, 6


@pytest.fixture
def fleet(tmp_path):
    workers = {role: [worker(role, tmp_path) for _ in range(2)] for role in ("prefill", "decode")}
    front = router(workers["prefill"], workers["decode"], tmp_path)
    try:
        for each in (*workers["prefill"], *workers["decode"], front):
            each.wait_until_ready()
        yield workers, front, tmp_path
    finally:
        for each in (front, *workers["decode"], *workers["prefill"]):
            each.close()


def test_random_kills(fleet):
    workers, front, folder = fleet
    rng = random.Random(3)
    prompts = [f"{word} {'and so on ' * (i % 7)}" for i, word in enumerate("abcdefghijklmnop")]
    lengths = (4, 16, 40)
    expected = {
        (prompt, length): streamed(workers["decode"][0], prompt, length) for prompt in prompts for length in lengths
    }
    over = threading.Event()
    killed = []

    def kill_now_and_then():
        while len(killed) < KILLS and not over.wait(rng.uniform(1.0, 4.0)):
            role = rng.choice(["prefill", "decode"])
            which = rng.randrange(2)
            old = workers[role][which]
            old.kill()
            killed.append(role)
            workers[role][which] = worker(role, folder, port=old.port)
            workers[role][which].wait_until_ready()

    killer = threading.Thread(target=kill_now_and_then)
    outcomes = {"right": 0, "error": 0}

    def ask(number: int) -> None:
        prompt, length = random.Random(number).choice(list(expected))
        try:
            found = streamed(front, prompt, length)
        except openai.APIError:
            outcomes["error"] += 1
            time.sleep(0.2)
            return
        assert found == expected[prompt, length], (number, prompt, length)
        outcomes["right"] += 1

    killer.start()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(REQUESTS)))
    over.set()
    killer.join()
    assert sum(outcomes.values()) == REQUESTS
    assert outcomes["right"] > REQUESTS * 0.7, (outcomes, killed)
    print(outcomes, killed, front.get("/status")["relay"])
    for each in (*workers["prefill"], *workers["decode"]):
        each.wait_until_ready()
        assert each.idle(60), (each.url, each.get("/split/status"), each.log())
