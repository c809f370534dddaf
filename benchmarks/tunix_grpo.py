"""Tunix's GRPO learner trains the demo model: this engine samples the answers, and Tunix trains this library's model.

Needs the extra `tunix`. `python benchmarks/tunix_grpo.py` trains with the reward of `mamba-jax train-grpo`, and prints
the reward of held-out problems before and after; docs/rollouts.md has the figures. `--output` writes the trained model.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import jax
import numpy as np
import optax
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from checkpoints import load_model
from checkpoints.export import write_hugging_face
from checkpoints.json_file import read_json
from checkpoints.resolve import resolve
from mamba_jax.model import parameters
from mamba_jax.train.corpus import SAMPLE_PROBLEMS, problem_prompt, read_documents
from mamba_jax.train.policy import arithmetic_reward
from serving import LLM, SamplingParams
from serving.tunix import TunixActor, TunixTokenizer
from serving.tunix.rollout import TunixRollout

LONGEST_PROMPT, MAX_TOKENS, HELD_OUT = 96, 48, 40
SAMPLES = 8
"""Answers to each problem."""


def mean_reward(llm: LLM, prompts: list[str], seed: int) -> float:
    """Returns the mean reward of sampled answers, `SAMPLES` for each prompt."""
    params = [
        SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=MAX_TOKENS, seed=seed + i) for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return float(np.mean([arithmetic_reward(choice.text) for output in outputs for choice in output.outputs]))


def train(llm: LLM, actor: TunixActor, prompts: list[str], args: argparse.Namespace) -> None:
    """Runs Tunix's GRPO learner for `args.steps` steps."""

    def rewards(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        found = [arithmetic_reward(text) for text in completions]
        print(f"{time.monotonic() - begin:.0f} s: reward {np.mean(found):.3f}", flush=True)
        return found

    begin, rng = time.monotonic(), np.random.default_rng(args.seed)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = RLCluster(
        actor=actor,
        tokenizer=TunixTokenizer(llm.get_tokenizer()),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            rollout_engine=functools.partial(TunixRollout, llm=llm, seed=args.seed),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(args.learning_rate, b2=0.99)),
                eval_every_n_steps=args.steps + 1,
                max_steps=args.steps,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=MAX_TOKENS, max_prompt_length=LONGEST_PROMPT, temperature=1.0
            ),
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0.0), rewards)
    batches = (
        {"prompts": np.array([prompts[i] for i in rng.choice(len(prompts), args.prompts_per_step, replace=False)])}
        for _ in range(args.steps)
    )
    learner.train(list(batches))


def main() -> None:
    """Parses the command line, trains, and prints the reward before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="Hugging Face directory with a tokenizer, or 'demo'")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="directory to create with the trained model")
    args = parser.parse_args()
    source = resolve(args.model).files
    llm = LLM(
        args.model, dtype="float32", max_model_len=LONGEST_PROMPT + MAX_TOKENS + 1, max_num_seqs=64,
        state_block_size=128, tile_size=32,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    every = [problem_prompt(document) for document in read_documents(source / SAMPLE_PROBLEMS, needs=("question",))]
    prompts = [prompt for prompt in every if len(tokenizer.encode(prompt)) <= LONGEST_PROMPT]
    actor = TunixActor(load_model(args.model, dtype="float32", progress=False))
    before = mean_reward(llm, prompts[-HELD_OUT:], args.seed)
    train(llm, actor, prompts[:-HELD_OUT], args)
    after = mean_reward(llm, prompts[-HELD_OUT:], args.seed)
    print(f"reward on {HELD_OUT} held-out problems: {before:.3f} before, {after:.3f} after {args.steps} steps")
    if args.output is not None:
        values = {name: leaf.get_value() for name, leaf in parameters(actor.model).items()}
        raw = read_json(source / "config.json")
        write_hugging_face(args.output, actor.model.config, values, raw, dtype="float32", files_from=source)


if __name__ == "__main__":
    main()
