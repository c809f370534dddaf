"""An engine finds kernels of every fault, and uses none of them: a real child runs them behind their operations."""

import dataclasses
import functools
import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.dispatch import Implementation
from serving import LLM, EngineConfig, SamplingParams
from serving.config import ConfigError
from serving.engine.assembly import chosen_kernels, kernel_check, kernel_check_child

pytestmark = pytest.mark.full
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


def test_every_fault_is_found_before_the_first_request(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_check, "run_child", functools.partial(kernel_check.run_child, running=15))
    command = (sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['main']()")
    check = functools.partial(kernel_check.refused_kernels, command=command)
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
