"""How many log-probabilities of one request keep their bits when the engine computes it under another schedule.

    python -m benchmarks.bits --model demo
    python -m benchmarks.bits --model demo --schedule-invariant

A prompt of 600 tokens is answered with 48 tokens: alone, from the cache, next to other requests, in chunks, with
drafts, after a preemption, in two engines of a split, and restored from host memory and from disk. The script measures
and never fails because bits differ.

Every run gives the same greedy tokens, up to ties. The bits of a log-probability can differ, because a sum over the
same numbers is rounded differently in a program of another shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints import load_config
from serving.config import EngineConfig
from serving.engine.assembly.build import build_engine
from serving.engine.engine import Engine
from serving.engine.llm import LLM
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.stats import DraftStats
from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import ONCE, PrefillSide, fed_tokens
from serving.split.transports import TcpTransport
from serving.split.wire import Handoff
from serving.split.worker import Worker

PLAIN = "alone"
"""The schedule that all others are compared with: the only request, nothing cached, no drafts."""
_PAGE = 32
_TIER_GIB = 1.0
"""Size of the caches in host memory and on disk."""
_FEW_SLOTS = 4
"""Slots of an engine that must evict the states of one prompt to keep those of another."""


@dataclass(frozen=True)
class Schedule:
    """One line of the table."""

    name: str
    equal: int
    """Log-probabilities with the bits of the plain run, of the same token after the same tokens."""
    total: int
    largest: float
    """The largest difference between two log-probabilities of the same token after the same tokens."""
    note: str = ""
    """What happened in the run, such as the number of cached tokens."""


@dataclass(frozen=True)
class Workload:
    """The measured request, and the other requests that run with it."""

    prompt: int = 600
    """Tokens of the prompt."""
    answer: int = 48
    """Tokens of the answer: the log-probabilities that are compared."""
    neighbors: Sequence[int] = (1, 7, 31)
    """Numbers of other requests."""
    chunks: Sequence[int] = (64, 512)
    """Maximum numbers of tokens per step, in a run for each."""

    def prompts(self, count: int, vocab_size: int) -> list[list[int]]:
        """Returns this many different prompts. Each repeats one piece, so that n-gram lookup finds drafts."""
        random = np.random.default_rng(0)
        pieces = random.integers(vocab_size // 10, vocab_size, (count, max(1, self.prompt // 3)))
        return [np.resize(piece, self.prompt).tolist() for piece in pieces]


def compare_schedules(
    model: str, workload: Workload = Workload(), *, flags: Mapping[str, Any] | None = None
) -> Iterator[Schedule]:
    """Yields the result of each schedule, the plain one first.

    Args:
        model: the reference that engines load.
        workload: the request.
        flags: flags of all engines.

    Raises:
        ConfigError: the flags do not fit the model or the workload.
    """
    config = load_config(model)
    prompt, *others = workload.prompts(1 + max(workload.neighbors, default=0), config.vocab_size)
    shared = {
        "max_model_len": workload.prompt + workload.answer + 1,
        "max_num_seqs": 1 + len(others),
        "page_size": _PAGE,
        "warmup": False,
    }
    shared |= flags or {}
    runs = _Runs(prompt, others, workload)

    with LLM(model, **shared) as llm:
        plain = runs.alone(llm)
        yield runs.compared(PLAIN, plain, plain)
        yield runs.compared("alone, again cold", runs.alone(llm), plain)
        half = runs.alone(llm, after=[prompt[: workload.prompt // 2]])
        yield runs.compared("half the prompt cached", half, plain, _cached(half))
        whole = runs.alone(llm, after=[prompt])
        yield runs.compared("whole prompt cached", whole, plain, _cached(whole))
        for count in workload.neighbors:
            name = "1 neighbor" if count == 1 else f"{count} neighbors"
            yield runs.compared(name, runs.among(llm, count), plain)
        yield runs.compared("scored as a prompt", runs.scored(llm, plain), plain)
    for chunk in workload.chunks:
        with LLM(model, **shared | {"max_num_batched_tokens": chunk}) as llm:
            yield runs.compared(f"chunks of {chunk}", runs.alone(llm), plain)
    for method, label in ({"ngram": "n-gram"} | ({"mtp": "MTP"} if config.mtp_pattern else {})).items():
        drafts = {"speculative_method": method, "num_speculative_tokens": 3, "adaptive_drafts": False}
        with LLM(model, **shared | drafts) as llm:
            run = runs.alone(llm)
            counts = run.metrics.drafts if run.metrics else DraftStats()
            yield runs.compared(f"3 {label} drafts", run, plain, f"{counts.accepted} of {counts.drafted} accepted")
    if config.num_attention_uses:
        # Two prompts fit, their answers do not: the later request is preempted and computed again.
        pages = 2 * math.ceil((workload.prompt + 1) / _PAGE) + 1
        with LLM(model, **shared | {"num_pages": pages, "max_num_seqs": 2}) as llm:
            run = runs.among(llm, 1)
            times = 0 if run.metrics is None else run.metrics.num_preemptions
            yield runs.compared("preempted", run, plain, f"{times} preemptions")
    for handoff in get_args(Handoff):
        yield runs.compared(f"split, {handoff}", *runs.split(model, shared, handoff, plain))
    few = {"max_num_seqs": 1, "num_slots": _FEW_SLOTS}
    if config.num_attention_uses:
        few["num_pages"] = 2 + math.ceil(shared["max_model_len"] / shared["page_size"])
    with LLM(model, **shared | few | {"host_cache_gib": _TIER_GIB}) as llm:
        run = runs.alone(llm, after=[prompt, *others[:2]])
        yield runs.compared("restored from host memory", run, plain, _fetched(run, llm))
    with tempfile.TemporaryDirectory(prefix="mamba-jax-bits-") as folder:
        disk = {"disk_cache": folder, "disk_cache_gib": _TIER_GIB}
        with LLM(model, **shared | disk) as llm:
            runs.fill(llm, [prompt], PLAIN)
        with LLM(model, **shared | disk) as llm:
            run = runs.alone(llm, salt=PLAIN)
            yield runs.compared("restored from disk", run, plain, _fetched(run, llm))


class _Runs:
    """Runs of one request under different schedules."""

    def __init__(self, prompt: list[int], others: list[list[int]], workload: Workload) -> None:
        self.prompt, self.others, self.workload = prompt, others, workload
        self._params = SamplingParams(temperature=0.0, max_tokens=workload.answer, ignore_eos=True, logprobs=0)
        self._salts = (f"schedule-{n}" for n in itertools.count())

    def alone(self, llm: LLM, *, after: Sequence[list[int]] = (), salt: str | None = None) -> RequestOutput:
        """Runs the request alone, with only the prompts `after`, or those of the salt, in its cache."""
        salt = salt or next(self._salts)
        self.fill(llm, after, salt)
        return llm.generate([self.prompt], self._params, use_tqdm=False, cache_salt=salt)[0]

    def fill(self, llm: LLM, prompts: Sequence[list[int]], salt: str) -> None:
        """Runs prompts one after the other, so that they are in the cache."""
        for prompt in prompts:
            llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False, cache_salt=salt)

    def among(self, llm: LLM, count: int) -> RequestOutput:
        """Runs the request after `count` others were queued, all together and nothing cached."""
        prompts = [*self.others[:count], self.prompt]
        return llm.generate(prompts, self._params, use_tqdm=False, cache_salt=next(self._salts))[-1]

    def scored(self, llm: LLM, plain: RequestOutput) -> RequestOutput:
        """Runs the prompt and the answer of the plain run as one prompt."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        prompt = self.prompt + plain.outputs[0].token_ids
        return llm.generate([prompt], params, use_tqdm=False, cache_salt=next(self._salts))[0]

    def split(self, model: str, flags: Mapping[str, Any], handoff: Handoff, plain: RequestOutput) -> tuple[Any, ...]:
        """Runs the prompt in one engine and the answer in another one, which receives the state over TCP.

        Returns the run, the plain run, and what happened.
        """
        config = EngineConfig.create(model=model, **flags)
        prefill, decode = (build_engine(config, progress=False) for _ in range(2))
        workers = [Worker(each, {"tcp": TcpTransport()}) for each in (prefill, decode)]
        there, here = PrefillSide(workers[0]), DecodeSide(workers[1])
        export = there.begin()
        prompt = {"prompt_token_ids": fed_tokens(self.prompt, handoff)}
        prefill.engine.add_request("prompt", prompt, ONCE, export=export)
        _finish(prefill.engine)
        remote = here.accept(there, there.ticket(export, self.prompt, handoff))
        run = decode.engine.add_request("answer", {"prompt_token_ids": self.prompt}, self._params, remote=remote)
        _finish(decode.engine)
        for built, worker in zip((prefill, decode), workers, strict=True):
            built.engine.close()
            worker.close()
        return run, plain, f"{here.stats.received_bytes:,} bytes of {here.stats.arrived} states transferred"

    def compared(self, name: str, run: RequestOutput, plain: RequestOutput, note: str = "") -> Schedule:
        """Returns the line of a run."""
        (tokens, logprobs), (right, expected) = self._answer(run), self._answer(plain)
        different = np.flatnonzero(tokens != right)
        same = int(different[0]) if len(different) else len(tokens)
        if same < len(tokens):
            note = ", ".join(filter(None, (note, f"another token at {same}")))
        equal = int((logprobs[:same].view(np.uint32) == expected[:same].view(np.uint32)).sum())
        largest = float(np.abs(logprobs[:same] - expected[:same]).max(initial=0.0))
        return Schedule(name, equal, len(expected), largest, note)

    def _answer(self, run: RequestOutput) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of the answer and their log-probabilities as float32."""
        if run.prompt_logprobs is None:
            (choice,) = run.outputs
            tokens, tables = choice.token_ids, choice.logprobs or []
        else:
            tokens = run.prompt_token_ids[-self.workload.answer :]
            tables = [table or {} for table in run.prompt_logprobs[-self.workload.answer :]]
        values = [table[token].logprob for token, table in zip(tokens, tables, strict=True)]
        return np.array(tokens), np.array(values, np.float32)


def _finish(engine: Engine) -> None:
    while engine.num_unfinished:
        engine.step()


def _fetched(run: RequestOutput, llm: LLM) -> str:
    tiers = llm.engine.loop.scheduler.stats()["tiers"]
    return f"{_cached(run)}, {sum(tier['arrived'] for tier in tiers.values())} states fetched"


def _cached(run: RequestOutput) -> str:
    return f"{run.num_cached_tokens} tokens cached"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint directory, 'demo', or a hub's name")
    parser.add_argument("--dtype", default="auto", help="data type of weights and activations")
    parser.add_argument("--schedule-invariant", action="store_true", help="run the engine with this flag")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each schedule")
    options = parser.parse_args(arguments)
    logging.getLogger("serving").setLevel(logging.WARNING)
    table = Table(title=f"{options.model}, {options.dtype}: log-probabilities with the bits of the plain run")
    for heading in ("schedule", "equal", "largest difference", ""):
        table.add_column(heading, justify="right" if heading in ("equal", "largest difference") else "left")
    flags = {"dtype": options.dtype, "schedule_invariant": options.schedule_invariant}
    for line in compare_schedules(options.model, flags=flags):
        if options.json:
            print(json.dumps(dataclasses.asdict(line)), flush=True)
        table.add_row(line.name, f"{line.equal} of {line.total}", f"{line.largest:.1e}", line.note)
    if not options.json:
        Console(soft_wrap=True, highlight=False).print(table)


if __name__ == "__main__":
    main()
