"""The effect of host memory and disk tiers on the time to the first token, and on other decoding requests.

    python -m benchmarks.tier_latency [--tokens 2048] [--conversations 8] [--rounds 12]

Engines in one process on CPU, a model of random weights. A turn is a conversation of so many tokens and 32 new ones.

* First token: of a turn whose conversation is nowhere (cold), on the device, in the host's memory, or on the disk (its
  files flushed and dropped from the page cache before).
* Decoding: one request decodes all the time, and every `--every` of its steps a turn of the next conversation comes.
  One engine's device holds all conversations, the other's two of them, so that each turn fetches one and evicts one,
  to memory and to the disk. Both run in turn, the same steps; only transfers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from benchmarks.split_latency import MODEL, finish
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepPrograms
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.engine import Engine
from serving.engine.requests.sampling_params import SamplingParams
from serving.tiers.mover import Mover

NEW = 32
"""New tokens of a turn."""
PAGE = 32


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)


class Talk:
    """An engine with room for so many conversations, and what is asked of it.

    `programs` that another one has compiled are not compiled again.
    """

    def __init__(
        self, model: HybridModel, tokens: int, room: int, *, programs: StepPrograms | None = None, **tiers: object
    ) -> None:
        config = EngineConfig.create(
            max_model_len=tokens + 1024, max_num_seqs=2, max_num_batched_tokens=512,
            num_slots=8 + 2 * room, num_pages=(room * (tokens + 512) + 1024) // PAGE, page_size=PAGE, **tiers,
        )  # fmt: skip
        self.engine: Engine = assemble(config, model, programs=programs).engine
        self.tokens, self._count = tokens, 0

    def prompt(self, conversation: int, length: int) -> list[int]:
        """Its first tokens."""
        return [(conversation * 7919 + at * 31 + at * at) % MODEL.vocab_size for at in range(length)]

    def turn(self, conversation: int) -> list[int]:
        """The conversation, and tokens that come this once."""
        self._count += 1
        new = [(self._count * 104729 + at * 17) % MODEL.vocab_size for at in range(NEW)]
        return self.prompt(conversation, self.tokens) + new

    def ask(self, prompt: list[int], count: int = 1):
        self._count += 1
        return self.engine.add_request(f"r{self._count}", {"prompt_token_ids": prompt}, params(count))

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to it, and tokens of the prompt that were found."""
        begin = time.perf_counter()
        output = self.ask(prompt)
        while not output.outputs[0].token_ids:
            self.engine.step()
        seconds = time.perf_counter() - begin
        finish(self.engine)
        return seconds, output.num_cached_tokens

    def settle(self) -> None:
        """Wait until everything is where it is going."""
        for source in self.engine.loop.sources:
            if isinstance(source, Mover):
                source.leaving.settle()

    def decode(self, turns: list[int], every: int) -> float:
        """Seconds in which one request decodes `every` tokens for each of these conversations' turns."""
        begin = time.perf_counter()
        output = self.ask(self.prompt(999, 64 + self._count % 7), every * len(turns))
        left, choice = list(turns), output.outputs[0]
        while not output.finished:
            if left and len(choice.token_ids) >= (len(turns) - len(left)) * every + every // 2:
                self.ask(self.turn(left.pop(0)))
            self.engine.step()
        seconds = time.perf_counter() - begin
        finish(self.engine)
        return seconds


def first_tokens(model: HybridModel, tokens: int, conversations: int, folder: Path) -> StepPrograms:
    """Prints how long they take by where the conversation is. Returns the programs."""
    found: dict[str, list[float]] = {}
    programs: StepPrograms | None = None
    for where, tiers in (
        ("host", {"host_cache_gib": 1}),
        ("disk", {"disk_cache": str(folder), "disk_cache_gib": 1}),
    ):
        talk = Talk(model, tokens, 2, programs=programs, **tiers)
        programs = talk.engine.loop.programs
        for number in (998, 997):
            talk.first_token(talk.turn(number))
            talk.first_token(talk.turn(number))  # these compiled
        for number in range(conversations):
            talk.first_token(talk.prompt(number, tokens))
        talk.settle()
        for again in range(3):
            for number in range(conversations):
                talk.settle()
                _drop_from_page_cache(folder)
                seconds, cached = talk.first_token(talk.turn(number))
                if cached != tokens:
                    print(f"{where}: {cached} tokens found of {tokens}")
                elif again:
                    found.setdefault(where, []).append(seconds)
        found.setdefault("device", []).append(talk.first_token(talk.turn(conversations - 1))[0])
        for number in range(100, 104):
            found.setdefault("cold", []).append(talk.first_token(talk.turn(number))[0])
        talk.engine.close()
    cold = statistics.median(found["cold"])
    for where, taken in found.items():
        middle = statistics.median(taken)
        print(
            f"first token, {where}: {middle * 1e3:.1f} ms, {middle / cold:.3f} of cold ({len(taken)} turns)", flush=True
        )
    assert programs is not None
    return programs


def decoding(talks: tuple[Talk, Talk], tokens: int, conversations: int, rounds: int, every: int) -> None:
    """Prints what transfers take from others. `talks`: one with room for all, one with tiers."""
    roomy, tiered = talks
    for talk in (roomy, tiered):
        for number in range(conversations):
            talk.first_token(talk.prompt(number, tokens))
        for number in (0, 1):
            talk.decode([number, number + 1], every)
    losses, plain = [], []
    before = tiered.engine.stats()["tiers"]["host"]["arrived"]
    for number in range(rounds):
        turns = [(2 * number + at) % conversations for at in range(2)]
        order = (roomy, tiered) if number % 2 else (tiered, roomy)
        seconds = {talk: talk.decode(turns, every) for talk in order}
        losses.append(1 - seconds[roomy] / seconds[tiered])
        plain.append(seconds[roomy])
    stats = tiered.engine.stats()["tiers"]
    low, _, high = (100 * each for each in statistics.quantiles(losses, n=4))
    print(
        f"decoding, a turn every {every} steps: a step takes {statistics.median(plain) / 2 / every * 1e3:.2f} ms; "
        f"with transfers {100 * statistics.median(losses):+.1f}% (median of {rounds}; half of them from {low:+.1f}% to "
        f"{high:+.1f}%); {stats['host']['arrived'] - before} of {2 * rounds} turns fetched, "
        f"{stats['disk']['stored_bytes'] / 1e6:.0f} MB written to the disk"
    )
    for talk in (roomy, tiered):
        talk.engine.close()


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a conversation")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=100, help="decode steps between two turns")
    given = parser.parse_args()
    model = HybridModel(MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        programs = first_tokens(model, given.tokens, given.conversations, Path(folder) / "first")
        tiers = {"host_cache_gib": 1, "disk_cache": f"{folder}/decoding", "disk_cache_gib": 1}
        tiered = Talk(model, given.tokens, 2, programs=programs, **tiers)
        roomy = Talk(model, given.tokens, given.conversations + 2, programs=programs)
        decoding((roomy, tiered), given.tokens, given.conversations, given.rounds, given.every)


if __name__ == "__main__":
    main()
