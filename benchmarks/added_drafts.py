"""Acceptance of drafts before and after `mamba-jax train-mtp`, for a model of a family without drafts.

    python -m benchmarks.added_drafts DIRECTORY --corpus corpus

trains a small Bamba on the prepared corpus (see `mamba_jax.train.corpus`), adds a draft layer, trains that with the
model frozen, and lets both forms continue held-out text with three drafts a step, greedy, 64 tokens after 128.
`before` is the layer as it begins: copies of the model's last sublayers. A run that was cut short goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from serving.bench.report import emit, environment

MODEL = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "vocab_size": 4096, "hidden_size": 64,
    "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 192, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 32, "tie_word_embeddings": True,
    "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--corpus", type=Path, default=Path("corpus"))
    parser.add_argument("--steps", type=int, default=600, help="of the model, 2,048 tokens each")
    parser.add_argument("--draft-steps", type=int, default=200, help="of the layer")
    parser.add_argument("--prompts", type=int, default=24)
    options = parser.parse_args(arguments)
    emit(**environment("bamba, hidden size 64, 4 layers"))
    before, after = prepare(options)
    for name, model in (("before", before), ("after", after)):
        emit(metric=f"acceptance_{name}", **acceptance(model, options.directory / "run/model", options.prompts))
    return 0


def prepare(options: argparse.Namespace) -> tuple[Path, Path]:
    """The model with a layer that has not been trained, and with one that has."""
    from checkpoints.draft_layer import begun_draft_layer, with_draft_layer, write_with_draft_layer
    from checkpoints.load import load_model
    from mamba_jax.model import parameters

    run, before, after = (options.directory / name for name in ("run", "before", "after"))
    recipe = options.directory / "recipe.yaml"
    settings = {
        "model": MODEL,
        "optimizer": {
            "name": "muon", "learning_rate": 8e-3, "adamw_learning_rate": 4e-3, "warmup_steps": 40,
            "schedule": "stable", "decay_steps": options.steps // 4,
        },
        "drafts": {"depth_weights": []}, "steps": options.steps, "batch_size": 8, "sequence_length": 256, "seed": 1,
    }  # fmt: skip
    options.directory.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(settings))
    _command("train", "--config", recipe, "--output", run, "--corpus", options.corpus)
    raw, config = with_draft_layer(run / "model", "*-")
    values = {path: leaf.get_value() for path, leaf in parameters(load_model(run / "model")).items()}
    if not before.exists():
        write_with_draft_layer(run / "model", before, raw, config, begun_draft_layer(config, values, 0))
    if not after.exists():
        _command(
            "train-mtp", "--model", run / "model", "--data", options.corpus, "--output", after,
            "--steps", options.draft_steps, "--sequence-length", 256, "--rollouts", 20_000,
        )  # fmt: skip
    return before, after


def _command(*words: object) -> None:
    from serving.cli.main import run

    if status := run([str(word) for word in words]):
        raise SystemExit(status)


def acceptance(model: Path, texts: Path, count: int) -> dict[str, Any]:
    """Mean accepted length, the free token included, and how often each draft in a row was right."""
    from checkpoints.load import require_tokenizer
    from mamba_jax.train.corpus import SAMPLE_TEXT
    from serving.api import evaluation
    from serving.engine.llm import LLM
    from serving.engine.sampling_params import SamplingParams

    llm = LLM(str(model), max_num_seqs=8, max_model_len=256, warmup=False, **evaluation.DRAFTS["MTP, K=3"])
    documents = evaluation.read_some(texts / SAMPLE_TEXT, None)
    prompts = evaluation.text_prompts(require_tokenizer(model), documents, count)
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    stats = evaluation.total_stats(llm.generate(prompts, params, use_tqdm=False))
    return {
        "v": round(stats.mean_acceptance_length, 3),
        "by_position": [round(rate, 3) for rate in stats.acceptance_at],
        "prompts": len(prompts),
    }


if __name__ == "__main__":
    raise SystemExit(main())
