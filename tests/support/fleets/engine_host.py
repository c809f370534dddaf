"""One of several hosts that run engines together: `python -m tests.support.fleets.engine_host JSON`.

Prints a line of JSON when all rounds are done: the leader what it has generated, a follower what it has read. Then it
goes on until it is killed. Without `led` each schedules for itself, both generate, and both end.
"""

import itertools
import json
import sys
import time
from functools import partial

import jax
from jax.experimental import multihost_utils

from checkpoints import placing
from mamba_jax.layout import shares
from mamba_jax.model import parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.sharding import axis
from serving import SamplingParams
from serving.config import EngineConfig
from serving.engine.assembly import build
from serving.hosts.host import Leader, follow, gather
from serving.hosts.settings import HostSettings
from tests.support.engines.engines import QUICK_COMPILE, use_widest_steps

FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_model_len": 96, "max_num_seqs": 2,
    "max_num_batched_tokens": 64, "num_slots": 24, "num_pages": 60, "adaptive_drafts": False, "warmup": False,
    "replay_interval": 1,
}  # fmt: skip
SHARED = [7, 8, 9, 30, 31, 32, 33, 34] * 4
PROMPTS = [[*SHARED, 5, 6, 7, 8], [*SHARED, 40, 41, 42, 43, 44, 45, 46], [*SHARED, 5, 6, 7, 8]]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=10, temperature=0.8, seed=3, presence_penalty=0.5, ignore_eos=True)


def ask(engine, prompts, params):
    """All prompts at once; tokens of each."""
    outputs = [engine.add_request(str(i), {"prompt_token_ids": ids}, params) for i, ids in enumerate(prompts)]
    while engine.loop.busy:
        engine.step()
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


def answers(engine):
    """Two prompts that share blocks, the first one again, and all of them drawn: tokens, and what was found cached."""
    use_widest_steps(engine)
    first, again, drawn = (
        ask(engine, *each) for each in ((PROMPTS[:2], GREEDY), (PROMPTS[2:], GREEDY), (PROMPTS, DRAWN))
    )
    engine.loop.scheduler.check(idle=True)
    return first[0] + again[0] + drawn[0], again[1]


def main(job):
    copied = []
    copy = placing._aligned_copy
    placing._aligned_copy = lambda values, dtype: copied.append(values.nbytes) or copy(values, dtype)
    axis.LEAST_TOKENS = job.get("least_tokens", axis.LEAST_TOKENS)
    shares.exchanges_less = lambda *_: job.get("pairs", False)
    build.StepPrograms = partial(StepPrograms, compiler_options=QUICK_COMPILE)
    coordinator = f"127.0.0.1:{job['port']}"
    hosts = HostSettings.create(coordinator=coordinator, num_hosts=job["hosts"], host_id=job["host"], host_timeout=8)
    flags = [FLAGS | {"model": job["directory"]} | each for each in job["rounds"]]
    group, config = gather(hosts, EngineConfig.create(**flags[0]))
    devices = config.tensor_parallel_size
    said, programs, built, led = [], {}, None, job.get("led", True)
    for each in flags:
        config = EngineConfig.create(**each, tensor_parallel_size=devices)
        kind = (config.num_speculative_tokens, config.speculative_method, config.replay_interval)
        if built is None:
            built = build.build_engine(config, progress=False, led=led)
        else:
            built = build.assemble(config, built.model, programs=programs.get(kind), led=led)
        programs[kind] = built.engine.loop.programs
        stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(built.engine.loop.store))
        assert stored == built.size.total_bytes
        use_widest_steps(built.engine)
        if not led or group.leads:
            if led:
                Leader(built.engine.loop, group, built.digest).wait_until_ready()
            said.append(answers(built.engine))
            if each is not flags[-1] or not led:
                built.engine.close()
        elif each is not flags[-1]:
            follow(built, group)
    held = sum(leaf[...].addressable_shards[0].data.nbytes for leaf in parameters(built.model).values())
    whole = sum(leaf[...].nbytes for leaf in parameters(built.model).values())
    slow = built.engine.loop.programs.slow_links
    print(json.dumps({"said": said, "copied": sum(copied), "held": held, "whole": whole, "slow": slow}), flush=True)
    if not led:
        multihost_utils.sync_global_devices("both have printed")
        group.exit()
    if not group.leads:
        follow(built, group)
    for i in itertools.count():
        ask(built.engine, [[5 + i % 80, *PROMPTS[0]]], GREEDY)
        time.sleep(0.01)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
