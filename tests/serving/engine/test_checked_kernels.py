"""Kernels that are wrong, hang or crash in the child process are not used, and a verdict is kept."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.dispatch import Implementation
from serving import LLM, EngineConfig, SamplingParams
from serving.config import ConfigError
from serving.engine.assembly import chosen_kernels, kernel_check, kernel_check_child
from serving.engine.assembly.chosen_kernels import kernel_choice
from serving.engine.assembly.kernel_check import refused_kernels, run_child

KERNELS = "recurrence_update pallas_gpu", "gated_update pallas_gpu", "paged_attention pallas_gpu"
CHILD = """
import json, os, sys, time
request = json.load(sys.stdin)
open(request["log"], "a").write("started ")
if "unavailable" in request["faults"].values():
    sys.exit(1)
left = [kernel for kernel in request["kernels"] if kernel not in request["skip"]]
for batch in [[kernel] for kernel in left] if request["alone"] else [left]:
    for kernel in batch:
        print("compile", kernel, flush=True)
    for kernel in batch:
        if request["faults"].get(kernel) == "crash compiling":
            os.abort()
        time.sleep(60 * (request["faults"].get(kernel) == "hang compiling"))
    for kernel in batch:
        print("compiled", kernel, flush=True)
print("ready GPU", flush=True)
for kernel in request["kernels"]:
    if kernel not in request["skip"]:
        print("run", kernel, flush=True)
        fault = request["faults"].get(kernel, "")
        if fault == "crash":
            os.abort()
        time.sleep(60 * (fault == "hang"))
        print("done", kernel, fault, flush=True)
print("end", flush=True)
"""


@pytest.fixture
def child(tmp_path):
    """Runs a child that has these faults; returns the verdicts, and how many processes that took."""

    def run(**faults):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        faults = {kernel: faults.get(kernel.split()[0], "") for kernel in KERNELS}
        request = {"kernels": KERNELS, "faults": faults, "log": str(log)}
        verdicts = run_child([sys.executable, "-c", CHILD], request, starting=3, running=2)
        return verdicts, log.read_text().count("started")

    return run


@pytest.mark.parametrize(
    ("faults", "why", "processes"),
    [
        ({}, "", 1),
        ({"gated_update": "two runs differ"}, "two runs differ", 1),
        ({"gated_update": "hang"}, "it did not end within 2 s", 2),
        ({"gated_update": "crash"}, "the process ended with code -6", 2),
        pytest.param({"gated_update": "hang compiling"}, "it did not end within 3 s", 3, marks=pytest.mark.full),
        ({"gated_update": "crash compiling"}, "the process ended with code -6", 3),
    ],
    ids=["sound", "wrong", "hangs", "crashes", "hangs in compilation", "crashes in compilation"],
)
def test_each_fault_is_one_verdict_and_the_other_kernels_are_checked(child, faults, why, processes):
    assert child(**faults) == ({KERNELS[0]: "", KERNELS[1]: why, KERNELS[2]: ""}, processes)


def test_a_child_that_cannot_begin_says_nothing_of_kernels(child):
    assert child(gated_update="unavailable") == (None, 1)


def test_a_child_that_does_not_end_is_killed():
    silent = "import os, time; os.close(1); time.sleep(60)"
    begin = time.monotonic()
    assert run_child([sys.executable, "-c", silent], {}, starting=30, running=0.5) is None
    assert time.monotonic() - begin < 30


def test_a_child_is_killed_if_the_parent_is_interrupted(monkeypatch):
    follow = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(kernel_check, "_follow", follow)
    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", "import time; time.sleep(60)"], {})
    assert follow.call_args.args[0].returncode == -9


@pytest.mark.full
def test_the_child_judges_no_kernel_on_another_platform(capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run_child(kernel_check.CHILD, {"platform": "tpu"}) is None
    assert "JAX runs on cpu instead of tpu" in capfd.readouterr().err


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A GPU, as far as the check can tell; the child answers from a list."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_check, "platform_at_hand", lambda: "gpu")
    answers = []
    monkeypatch.setattr(kernel_check, "run_child", lambda command, request: answers.pop(0))
    return answers


WRONG = {KERNELS[0]: "", KERNELS[1]: "two runs differ"}
REFUSED = {("gated_update", "pallas_gpu"): "two runs differ"}


def test_a_verdict_is_kept_and_read_again(machine, tmp_path):
    machine.append(WRONG)
    assert [refused_kernels(EngineConfig.create()) for _ in range(2)] == [REFUSED, REFUSED]  # the list had one
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text()) == WRONG
    machine += [{}, {}]
    assert refused_kernels(EngineConfig.create(max_num_seqs=3)) == {}  # other flags
    path.write_text("{")
    assert refused_kernels(EngineConfig.create()) == {}
    assert not machine


OUT_OF_MEMORY = "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes."
TOO_LARGE = "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem."


@pytest.mark.parametrize(
    ("answer", "refused", "kept"),
    [
        (None, {}, False),
        (WRONG | {KERNELS[2]: OUT_OF_MEMORY}, REFUSED, False),
        ({KERNELS[1]: TOO_LARGE}, {("gated_update", "pallas_gpu"): TOO_LARGE}, True),
    ],
)
def test_a_failed_check_and_a_lack_of_memory_are_no_verdicts(machine, tmp_path, answer, refused, kept):
    machine.append(answer)
    assert refused_kernels(EngineConfig.create()) == refused
    assert bool(list(tmp_path.rglob("*.json"))) == kept


@pytest.mark.parametrize("kernels", ["auto", "gated_update=pallas_gpu"])
def test_the_verdict_of_the_first_process_holds_for_all(machine, monkeypatch, kernels):
    """Also if it is an error, and also if each process schedules for itself."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    machine.append(WRONG)
    told = []

    def broadcast(value):
        told.extend([json.loads(json.dumps(value))] * (jax.process_index() == 0))
        return told[0]

    monkeypatch.setattr(chosen_kernels, "of_first_process", broadcast)
    for process, led in ((0, True), (1, True), (1, False)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        if kernels == "auto":
            assert chosen_kernels.refused_on_all(EngineConfig.create(), led) == REFUSED
            continue
        with pytest.raises(ConfigError, match="two runs differ"):
            chosen_kernels.refused_on_all(EngineConfig.create(kernels=kernels), led)
    assert not machine


@pytest.mark.parametrize("flags", [{"kernel_check": "off"}, {"kernels": "xla"}])
def test_without_a_check_no_process_is_started(machine, flags):
    assert refused_kernels(EngineConfig.create(**flags)) == {}


def test_a_named_kernel_that_is_wrong_is_an_error(machine):
    machine += [WRONG, WRONG]
    for kernels in ("pallas_gpu", "recurrence_update=xla, gated_update=pallas_gpu"):
        with pytest.raises(ConfigError, match="two runs differ"):
            refused_kernels(EngineConfig.create(kernels=kernels, kernel_check="always"))


def test_a_refused_kernel_is_not_chosen():
    choice = kernel_choice(EngineConfig.create(), REFUSED)
    assert choice.refused == REFUSED
    assert "gated_update" in choice.description


PARENT = """
import fcntl, functools, os, sys
import jax.extend.backend
from serving import EngineConfig
from serving.engine.assembly import build, chosen_kernels
from serving.engine.assembly.kernel_check import refused_kernels

lock, child = sys.argv[1:]

def take_the_chip():
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os._exit(7)

jax.extend.backend.register_backend_factory("chip", take_the_chip, priority=900)
chosen_kernels.refused_kernels = functools.partial(refused_kernels, command=[sys.executable, "-c", child, lock])
build.build_engine(EngineConfig.create(model="demo", kernel_check="always"))
"""
HOLDS_THE_CHIP = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write("checked")
file.flush()
print("ready", "end", sep="\\n", flush=True)
time.sleep(60)
"""


@pytest.mark.full
def test_jax_is_started_only_after_the_child_has_ended(tmp_path):
    """A chip is for one process: here a lock, which the child has until it is ended, even if it says no more."""
    lock = tmp_path / "chip"
    lock.touch()
    environment = os.environ | {"JAX_PLATFORMS": "chip", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(lock), HOLDS_THE_CHIP]
    assert subprocess.run(command, env=environment, check=False, timeout=120).returncode == 7
    assert lock.read_text() == "checked"


# -- an engine finds kernels of every fault, and uses none of them: a real child runs them behind their operations --

COUNT = itertools.count(1)


def after(y, run):
    """y, once the host has run a function that returns a number, which is added."""
    noise = jax.pure_callback(lambda: np.float32(run() or 0), jax.ShapeDtypeStruct((), jnp.float32))
    return y.at[0].add(noise)


FAULTS = {
    "recurrence_update": (lambda y, stores, args: (y.at[2].mul(1.05), *stores), "its result"),
    "recurrence_replay": (lambda y, stores, args: (after(y, lambda: 1e-7 * next(COUNT)), *stores), "two runs differ"),
    "recurrence_scan": (lambda y, stores, args: (after(y, os.abort), *stores), "ended with code -6"),
    "gated_update": (lambda y, stores, args: (after(y, lambda: time.sleep(600)), *stores), "did not end within 15 s"),
    "gated_replay": (lambda y, stores, args: (y, stores[0].at[-2].add(1), *stores[1:]), "not its row's"),
    "paged_attention": (lambda y, stores, args: y.at[0].add(args[1][0].sum()), "its result has nan"),
}
"""By operation: its kernel's results, made of sound ones, and the verdict."""


def main():
    """The child, whose kernels are the plain forms with faults."""

    def planted(call, kernel):
        plain = call.candidates[-1]

        def run(*args, **kwargs):
            out = plain.run(*args, **kwargs)
            if (fault := FAULTS.get(call.operation)) is None:
                return out
            y, stores = (out[0], out[1:]) if isinstance(out, tuple) else (out, ())
            return fault[0](y, stores, args)

        return dataclasses.replace(call, candidates=(Implementation(kernel, run), plain)), kernel

    sound = kernel_check_child.with_kernels
    kernel_check_child.with_kernels = lambda *args, **options: [planted(*case) for case in sound(*args, **options)]
    kernel_check_child.main()


@pytest.mark.full
def test_every_fault_is_found_before_the_first_request(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_check, "run_child", functools.partial(run_child, running=15))
    command = (sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['main']()")
    check = functools.partial(refused_kernels, command=command)
    monkeypatch.setattr(chosen_kernels, "refused_kernels", check)
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "num_slots": 16, "num_pages": 8, "warmup": False}
    with LLM("demo", kernel_check="always", **sizes) as llm:
        refused = llm.engine.loop.programs.kernels.refused
        assert {operation for operation, _ in refused} == set(FAULTS)
        for (operation, _), why in refused.items():
            assert FAULTS[operation][1] in why
        assert llm.engine.stats()["kernel_fallbacks"] == len(FAULTS)
        assert llm.generate(["Once"], SamplingParams(max_tokens=4))[0].outputs[0].token_ids
    named = EngineConfig.create(model="demo", kernels="gated_update=pallas_gpu_interpreted", **sizes)
    begin = time.process_time()
    with pytest.raises(ConfigError, match="failed the check"):
        check(named)
    assert time.process_time() - begin < 0.2  # the verdict is kept
