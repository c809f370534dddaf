"""Measurements of this machine: kernels against their plain forms, collectives, copies and the engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.kernel_check.calls import Call
from mamba_jax.kernel_check.compare import MARGIN, Timed, compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.model import HybridModel
from serving.check.report import Deadline, Report
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.llm import LLM
from serving.engine.requests.sampling_params import SamplingParams

LONGEST = 4e-3
"""Seconds that a loop of calls should take."""
Cases = list[tuple[Call, str]]
"""Calls, each with the name of a kernel."""


def wait_for_programs(compiler: Compiler, report: Report, deadline: Deadline) -> None:
    """Waits for what was submitted: while it is compiled, nothing is timed."""
    done, count, seconds = compiler.wait(0.8 * deadline.left)
    report.add("compile", programs=count, done=done, seconds=round(seconds, 1))


def compare_kernels(cases: Cases, report: Report, compiler: Compiler, deadline: Deadline) -> int:
    """Compares each kernel with the plain form, on rows of all classes; returns how many are wrong."""
    failed, compared = 0, [(*case, compiler.submit(compiled_comparison, *case, compiler)) for case in cases]
    wait_for_programs(compiler, report, deadline)
    for call, kernel, compiling in deadline.each("kernel against plain", compared, named=_label):
        about = {"call": call.label, "kernel": kernel}
        try:
            found = compiling.result(max(1.0, deadline.left))()
            wrong = found.wrong
            about |= {"of allowed error": round(max(found.y, found.states), 4)} if not wrong else {}
        except (TimeoutError, CancelledError):
            report.add("kernel against plain", **about, skipped="it is not compiled yet")
            continue
        except Exception as error:  # the other cases are still wanted
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        failed += bool(wrong)
        report.add("kernel against plain", **about, **({"wrong": wrong} if wrong else {"equal": True}))
    return failed


def time_kernels(
    cases: Cases, report: Report, compiler: Compiler, deadline: Deadline, *, copy: float, most: int
) -> None:
    """Times each kernel and the plain form, and reports both with the share of a copy's bandwidth.

    copy: bytes per second of a copy, which tells how many calls, up to `most`, a loop has.
    """
    compiled = partial(compiled_timings, seconds=LONGEST, bandwidth=copy, most=most)
    slower, loops = [], [(*case, compiler.submit(compiled, *case, compiler)) for case in cases]
    wait_for_programs(compiler, report, deadline)
    if compiler.busy:
        raise TimeoutError("programs are still being compiled")
    for call, name, compiling in deadline.each("kernel", loops, named=_label):
        try:
            timed = compiling.result(max(1.0, deadline.left))
            kernel, plain = (timed[each].seconds() * 1e6 for each in (name, call.plain))
        except Exception as error:
            report.add("kernel", call=call.label, by=name, error=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        moved = timed[name].moved
        if kernel > plain * MARGIN:
            slower.append(f"{call.label} by {name}: {kernel:.1f} us, plain {plain:.1f}")
        report.add(
            "kernel", call=call.label, by=name, us=round(kernel, 2), **{
                "us plain": round(plain, 2), "times as fast": round(plain / kernel, 3),
                "MB": round(moved / 1e6, 3), "of a copy": round(moved / kernel * 1e6 / copy, 3),
            },
        )  # fmt: skip
    report.add("slower kernels", count=len(slower), calls=slower)


def _label(case: tuple[Call, str, Any]) -> str:
    return case[0].label


NUMBERS, CALLS = 1 << 20, 20
"""Numbers of bfloat16 that a device has, and calls in one program."""


def _seconds(array: jax.ShapeDtypeStruct, body: Callable[[jax.Array], jax.Array]) -> float:
    """Of one call of `body` on an array of ones, in a loop of `CALLS` on the device."""
    make = jax.jit(lambda: jnp.ones(array.shape, array.dtype), out_shardings=array.sharding)

    def loop(x: jax.Array, rest: Any) -> Any:
        return jax.lax.fori_loop(0, CALLS, lambda step, v: jax.lax.optimization_barrier(body(v)), x), rest

    compiled = jax.jit(loop, donate_argnums=0).lower(array, ()).compile()
    return Timed(lambda: (make(), ()), compiled, CALLS, array.size).seconds()


def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second, read plus written, of a large copy."""
    return 2 * nbytes / _seconds(jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32), lambda x: x + 1)


def time_collectives(report: Report) -> None:
    """Reports the time of each kind; nothing on one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return
    mesh, of_device, count = Mesh(np.array(devices), ("device",)), PartitionSpec("device"), len(devices)
    to_next = [(each, (each + 1) % count) for each in range(count)]
    kinds: dict[str, Callable[[jax.Array], Any]] = {
        "psum": lambda x: jax.lax.psum(x, "device") / count,
        "all_gather": lambda x: jax.lax.all_gather(x, "device")[0],
        "psum_scatter": lambda x: jnp.tile(jax.lax.psum_scatter(x, "device", tiled=True), count),
        "all_to_all": lambda x: jax.lax.all_to_all(x.reshape(count, -1), "device", 0, 0).reshape(-1),
        "ppermute": lambda x: jax.lax.ppermute(x, "device", to_next),
    }
    size = NUMBERS // count * count
    array = jax.ShapeDtypeStruct((count * size,), jnp.bfloat16, sharding=NamedSharding(mesh, of_device))
    for kind, run in kinds.items():
        us = _seconds(array, jax.shard_map(run, mesh=mesh, in_specs=of_device, out_specs=of_device)) * 1e6
        report.add("collective", kind=kind, devices=count, us=round(us, 1), MB=round(2 * size / 1e6, 2))


GREEDY = Path(__file__).with_name("greedy.json")
"""Prompts, and what the demo model says after each in float32 on a CPU."""
PROMPT = 64
"""Tokens of each request of `time_engine`."""
_FLAGS: Any = {"max_num_seqs": 4, "num_slots": 32, "num_pages": 64, "warmup": False, "kernel_check": "off"}


def check_greedy(report: Report) -> bool:
    """Whether the demo model's greedy tokens are equal to the stored ones."""
    stored = json.loads(GREEDY.read_text())
    params = SamplingParams(temperature=0, max_tokens=len(stored["tokens"][0]), ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": ids} for ids in stored["prompts"]]
    # By itself a GPU multiplies float32 as TF32, whose ten bits could turn a close decision. A context would not do: it
    # is this thread's alone, and the engine traces in others.
    before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        with LLM("demo", dtype="float32", max_model_len=512, **_FLAGS) as llm:
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    equal = sum(one == other for one, other in zip(found, stored["tokens"], strict=True))
    report.add("greedy tokens", prompts=len(found), equal=equal)
    if equal < len(found):
        report.add("greedy tokens", found=found)
    return equal == len(found)


def check_bits(report: Report, tokens: int = 48) -> bool:
    """Whether the demo model's log-probabilities have the same bits alone and with other requests, with
    `schedule_invariant`; True where that is not supported."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    prompts: Any = [{"prompt_token_ids": [2 + row, *range(3, PROMPT + 5 * row)]} for row in range(4)]
    try:
        with LLM("demo", schedule_invariant=True, max_model_len=256, **_FLAGS) as llm:
            outputs = [llm.generate(some, params, use_tqdm=False)[0].outputs[0] for some in (prompts[:1], prompts)]
    except ConfigError as error:
        report.add("bits", skipped=str(error))
        return True
    alone, among = (
        [(token, table[token]) for token, table in zip(out.token_ids, out.logprobs or (), strict=True)]
        for out in outputs
    )
    equal = sum(one == other for one, other in zip(alone, among, strict=True))
    report.add("bits", tokens=tokens, equal=equal)
    return equal == tokens


def time_engine(
    model: HybridModel, name: str, report: Report, compiler: Compiler, *, requests: int, tokens: int, left: float
) -> None:
    """The engine with as many requests at once, each a short prompt and `tokens` tokens."""
    begin = time.perf_counter()
    length = PROMPT + tokens + 1
    config = EngineConfig.create(
        max_num_seqs=requests, max_model_len=length, warmup=False, num_slots=3 * requests + 8,
        num_pages=requests * (length // 16 + 2) + 8,
    )  # fmt: skip
    engine = assemble(config, model).engine
    try:
        loop = engine.loop
        loop.programs.kept = compiler
        batches = list(loop.batches.warm_up_batches(engine.vocab_size))[: loop.batches.num_essential]
        jobs = [compiler.submit(loop.programs.program, *loop.shapes, batch) for batch in batches]
        compiler.wait(0.8 * left)
        if compiler.busy:
            raise TimeoutError("programs are still being compiled")
        for job in jobs:
            job.result(0)
        loop.batches.use_only(batches)
        report.add("engine programs", count=len(batches), seconds=round(time.perf_counter() - begin, 1))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for round_ in range(2):  # no prompt of the second is cached; it is the one that counts
            begin = time.perf_counter()
            for row in range(requests):
                prompt = [2 + row, 2 + round_, *range(3, PROMPT + 1)]
                engine.add_request(f"{round_}-{row}", {"prompt_token_ids": prompt}, params)
            while engine.busy:
                engine.step()
            taken = time.perf_counter() - begin
        rate = round(requests * tokens / taken, 1)
        report.add("generate", model=name, requests=requests, tokens=tokens, **{"tokens/s": rate})
        report.add("engine kernels", chosen=loop.programs.kernels.report())
    finally:
        engine.close()
