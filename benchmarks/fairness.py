"""What a second API key has left while another one attacks: rate, gaps and first tokens of its stream, with controls.

    python -m benchmarks.fairness [--seconds 20] [--only TEXT]

Runs in a checkout, with the tests' small model and adapters. Each attack stands between two controls, in which the
second key is alone. Goals with two keys: a rate of at least 0.8 of the fair share, which is half of the control's, and
gaps whose 99th percentile is at most 3 times the control's. `tests/serving/core/test_client_shares.py` shows the same
without a clock, by counts of steps on machines of known speed, and that a short prompt begins within two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from checkpoints.adapters.adapter import CONFIG_FILE
from tests.support.fleets.processes import running, worker
from tests.support.models.golden_case import FIXTURES

FIXTURE = FIXTURES / "nemotronh-moe"
ADAPTERS, PLACES = 5, 2
KEYS = {"attacker": "first", "victim": "second"}
LONGEST = 1024

Attack = Callable[["Client"], None]


class Client:
    """One connection of a key."""

    def __init__(self, url: str, key: str, number: int = 0) -> None:
        self.rng = random.Random(number)
        self._http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[key]}"}, timeout=120.0)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(3, 90) for _ in range(length)]

    def post(self, **body: object) -> None:
        self._http.post("/v1/completions", json=self._whole(body))

    def stream(self, seconds: float, **body: object) -> list[float]:
        """Returns when each piece arrived; ends the stream after so many seconds."""
        times: list[float] = []
        begin = time.monotonic()
        with self._http.stream("POST", "/v1/completions", json=self._whole(body) | {"stream": True}) as answer:
            for line in answer.iter_lines():
                times += [time.monotonic()] if line.startswith("data: {") else []
                if time.monotonic() - begin > seconds:
                    break
        return times

    @staticmethod
    def _whole(body: dict[str, object]) -> dict[str, object]:
        return {"model": "base", "temperature": 0, "ignore_eos": True} | body


def choices(client: Client) -> None:
    client.post(prompt=[client.prompt(8) for _ in range(8)], n=8, temperature=1.0, max_tokens=60)


def chats(client: Client) -> None:
    client.post(prompt=client.prompt(60), max_tokens=6)


def dropped(client: Client) -> None:
    with contextlib.suppress(httpx.HTTPError):
        body = client._whole({"prompt": client.prompt(LONGEST - 100), "max_tokens": 4})
        client._http.post("/v1/completions", json=body, timeout=client.rng.uniform(0.05, 0.3))


def rotating(client: Client) -> None:
    client.post(model=f"adapter-{client.rng.randrange(ADAPTERS)}", prompt=client.prompt(8), max_tokens=2)


ATTACKS: dict[str, tuple[int, Attack]] = {
    "8 choices of 8 prompts": (1, choices),
    "12 chats": (12, chats),
    "long prompts dropped in mid-prefill": (8, dropped),
    f"{ADAPTERS} adapters over {PLACES} places": (6, rotating),
}


def victim(url: str, seconds: float) -> tuple[float, float, float]:
    """Returns tokens a second, the 99th percentile of the gaps, and the median wait for a first token."""
    client, end = Client(url, "victim"), time.monotonic() + seconds
    gaps: list[float] = []
    firsts: list[float] = []
    begin = time.monotonic()
    while (left := end - time.monotonic()) > 0:
        asked = time.monotonic()
        times = client.stream(left, prompt=client.prompt(6), max_tokens=300, return_token_ids=True)
        firsts += [times[0] - asked] if times else []
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    rate = len(gaps) / (time.monotonic() - begin)
    return rate, sorted(gaps)[int(0.99 * len(gaps))], statistics.median(firsts)


def attack_for_ever(url: str, name: str) -> None:
    """Runs in a process of low priority: on machines of few cores, clients would take the server's time."""
    os.nice(19)
    count, attack = ATTACKS[name]

    def repeat(number: int) -> None:
        client = Client(url, "attacker", number)
        while True:
            attack(client)

    for number in range(count):
        threading.Thread(target=repeat, args=(number,)).start()


def attacked(url: str, seconds: float, name: str) -> tuple[float, float, float]:
    """Returns what the victim has meanwhile."""
    attacker = multiprocessing.get_context("spawn").Process(target=attack_for_ever, args=(url, name))
    attacker.start()
    time.sleep(4.0)
    try:
        return victim(url, seconds)
    finally:
        attacker.kill()
        attacker.join()
        time.sleep(2.0)  # the server ends what the attacker left


def adapters(folder: Path) -> list[str]:
    """Returns the options for adapters of the same weights with other scales."""
    options = []
    for number in range(ADAPTERS):
        copy = shutil.copytree(FIXTURE / "adapter", folder / f"adapter-{number}")
        config = json.loads((copy / CONFIG_FILE).read_text())
        (copy / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": (1 + number) * config["lora_alpha"]}))
        options.append(f"--lora-modules={copy.name}={copy}")
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="Of each control and each attack.")
    parser.add_argument("--only", default="", help="Only attacks whose names contain this.")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fairness-"))
    more = [*adapters(folder), "--enable-lora", "--warmup", *(f"--api-key={key}" for key in KEYS.values())]
    engine = {"model": FIXTURE, "served_model_name": "base", "dtype": "float32", "max_model_len": LONGEST}
    engine |= {"max_loras": PLACES, "max_lora_rank": 4, "max_num_seqs": 16, "num_slots": 100, "num_pages": 2000}
    server = worker("", folder, *more, **engine)
    with running(server, seconds=900):
        victim(server.url, 3.0)
        print(f"logs in {folder}; of the control's: rate (fair: 0.5), 99th percentile of gaps, first token", flush=True)
        for name in ATTACKS:
            if options.only not in name:
                continue
            before = victim(server.url, options.seconds)
            found = attacked(server.url, options.seconds, name)
            after = victim(server.url, options.seconds)
            control = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
            ratios = [each / alone for each, alone in zip(found, control, strict=True)]
            print(
                f"{ratios[0]:5.2f} {ratios[1]:6.2f} {ratios[2]:6.2f}  {name}; {control[0]:.0f} tokens/s alone",
                flush=True,
            )


if __name__ == "__main__":
    main()
