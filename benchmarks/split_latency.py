"""From "the prompt is computed" to the decode worker's first token: the transfer, and decode steps.

    python -m benchmarks.split_latency [--tokens 2048]

Two engines in one process on CPU, states sent by JAX's transfer engine over loopback; a model of random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
from flax import nnx

from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig, MLPConfig
from mamba_jax.model import HybridModel
from serving.config import EngineConfig
from serving.engine.assembly.build import AssembledEngine, assemble
from serving.engine.engine import Engine
from serving.engine.requests.sampling_params import SamplingParams
from serving.split.decode_side import DecodeSide
from serving.split.peer import DirectPeer
from serving.split.prefill_side import PrefillSide
from serving.split.prefilling import ONCE, fed_tokens, ticket_of
from serving.split.transport import JaxTransport
from serving.split.worker import Worker

MODEL = HybridConfig(
    family="bench",
    vocab_size=4096,
    hidden_size=512,
    norm_eps=1e-5,
    pattern="M-M*-M-M-M*-M-",
    mamba=MambaConfig(num_heads=16, head_dim=64, state_size=64, num_groups=2, conv_width=4),
    attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=64, scale=64**-0.5, input_size=512),
    mlp=MLPConfig(intermediate_size=1536, activation="relu2", gated=False),
)


def build(longest: int) -> AssembledEngine:
    """An engine of one seat."""
    config = EngineConfig.create(
        max_model_len=longest, max_num_seqs=1, max_num_batched_tokens=512, num_slots=24, num_pages=longest // 32 * 3
    )
    model = HybridModel(MODEL, rngs=nnx.Rngs(0), dtype=jnp.float32)
    return assemble(config, model)


def finish(engine: Engine) -> None:
    while engine.loop.busy:
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompts")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    prefill, decode = build(given.tokens + 64), build(given.tokens + 64)
    there = PrefillSide(Worker.of(prefill, {"jax": JaxTransport()}, model="same"))
    here = DecodeSide(Worker.of(decode, {"jax": JaxTransport()}, model="same"), executor=ThreadPoolExecutor(2))
    peer = DirectPeer(there)
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    waits, transfers, steps = [], [], []
    for number in range(given.rounds + 2):
        prompt = [(number * 7919 + i * 31) % MODEL.vocab_size for i in range(given.tokens)]
        export = there.begin()
        prefill.engine.add_request(f"p{number}", {"prompt_token_ids": fed_tokens(prompt, "full")}, ONCE, export=export)
        finish(prefill.engine)
        ticket = ticket_of(there, export, prompt, "full", worker="here")
        before = dataclasses.replace(here.stats)
        begin = time.perf_counter()
        remote = here.accept(peer, ticket)
        output = decode.engine.add_request(f"d{number}", {"prompt_token_ids": prompt}, greedy, remote=remote)
        while not output.outputs[0].token_ids:
            decode.engine.step()
        first = time.perf_counter()
        count = len(output.outputs[0].token_ids)
        finish(decode.engine)
        step = (time.perf_counter() - first) / (len(output.outputs[0].token_ids) - count)
        if number < 2:
            continue  # these compiled
        waits.append(first - begin)
        transfers.append(here.stats.fetch_seconds - before.fetch_seconds)
        steps.append(step)
    beyond = [(wait - transfer) / step for wait, transfer, step in zip(waits, transfers, steps, strict=True)]
    sent = here.stats.received_bytes / here.stats.arrived
    middle = statistics.median
    print(f"prompts of {given.tokens} tokens, {sent / 1e6:.1f} MB each; medians of {given.rounds}")
    print(f"first token after {middle(waits) * 1e3:.1f} ms, of it transfer {middle(transfers) * 1e3:.1f} ms")
    print(f"a decode step takes {middle(steps) * 1e3:.1f} ms; beyond the transfer: {middle(beyond):.2f} steps")
    for side in (there, here):
        side.worker.close()


if __name__ == "__main__":
    main()
