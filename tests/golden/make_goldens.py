"""Makes the golden fixtures: tiny random models of every family, and what Hugging Face says about them.

    cd tests && python -m golden.make_goldens [NAME...]      (needs the `parity` extra)
    cd tests && python -m golden.make_goldens rope           (`rope.json`: scaled rotary embeddings)

Each fixture is a directory: `config.json` and `model.safetensors` as Hugging Face writes them (or wrote them once, or
as the makers of the models do: see `recipes.py`), and `goldens.npz`. Before anything is written it is checked that the
model is alive: each weight and each config field of the recipe's `changes` moves the log-probabilities.

`goldens.npz` has, for each prompt i (1, 3, chunk-1, chunk, chunk+1 and 3*chunk+5 tokens):

    tokens_i     [length]              the prompt
    positions_i  [n]                   positions that are compared
    ids_i        [n, m]                vocabulary entries that are compared at each (all of them for short prompts)
    logprobs_i   [n, m] float32        their log-probabilities after that position's token
    greedy_i     [16]                  the most likely continuation
    gaps_i       [16] float32          by how much each of its tokens beats the runner-up (log-probability)

and, where a draft layer has an oracle, of the prompt of chunk+1 tokens, for pairs (hidden state i, token i + 1):

    draft_positions, draft_ids, draft_logprobs       as above
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden import ling_drafts, oracle, qwen_drafts
from golden.recipes import RECIPES, Recipe
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GREEDY = 16
FEW_POSITIONS, MANY_POSITIONS = 24, 56
TOP_IDS, RANDOM_IDS = 8, 32
MOST_BYTES = 1 << 20
LEAST_MOVE = 3e-3
"""What a change of one weight or field must move the log-probabilities by, somewhere; the tests allow 2e-4."""


def make(name: str, recipe: Recipe, root: Path) -> None:
    """Writes one fixture."""
    model = oracle.build(recipe)
    prompts = draw_prompts(recipe)
    check_alive(name, recipe, model, prompts[-1])
    target = root / name
    target.mkdir(parents=True, exist_ok=True)
    arrays = write_model(recipe, model, target, prompts[4])
    generator = np.random.default_rng(recipe.seed)
    for i, tokens in enumerate(prompts):
        full = oracle.log_probs(model, tokens).numpy()
        arrays |= {f"{key}_{i}": array for key, array in entries(full, generator).items()}
        continuation, gaps = oracle.greedy(model, tokens, GREEDY)
        arrays[f"tokens_{i}"] = np.array(tokens, np.int16)
        arrays[f"greedy_{i}"] = np.array(continuation, np.int16)
        arrays[f"gaps_{i}"] = np.array(gaps, np.float32)
    np.savez_compressed(target / "goldens.npz", **arrays)
    size = sum(path.stat().st_size for path in target.iterdir())
    if size > MOST_BYTES:
        raise SystemExit(f"{name}: {size} bytes, more than {MOST_BYTES}")
    entropy = float(-(np.exp(full) * full).sum(axis=1).mean())
    distinct = len({int(token) for i in range(len(prompts)) for token in arrays[f"greedy_{i}"]})
    print(
        f"{name}: {size / 1e3:.0f} kB, spread {full.std():.2f}, entropy {entropy:.2f} of {math.log(full.shape[1]):.2f},"
        f" {distinct} distinct greedy tokens",
        flush=True,
    )


def draw_prompts(recipe: Recipe) -> list[list[int]]:
    """Random prompts whose lengths surround the chunk size."""
    generator, chunk = np.random.default_rng(1000 + recipe.seed), recipe.chunk_size
    lengths = (1, 3, chunk - 1, chunk, chunk + 1, 3 * chunk + 5)
    return [generator.integers(0, recipe.config["vocab_size"], length).tolist() for length in lengths]


def entries(full: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns positions, vocabulary entries and log-probabilities to keep: all of short prompts, some of long ones."""
    length, vocab = full.shape
    positions, ids = np.arange(length), np.tile(np.arange(vocab), (length, 1))
    if length > 3:
        count = min(length, FEW_POSITIONS if length < 3 * FEW_POSITIONS else MANY_POSITIONS)
        others = generator.choice(length - 4, count - 4, replace=False)
        positions = np.sort(np.concatenate([others, np.arange(length - 4, length)]))
        top = np.argsort(-full[positions], axis=1)[:, :TOP_IDS]
        some = np.stack([generator.choice(vocab, RANDOM_IDS, replace=False) for _ in positions])
        ids = np.concatenate([top, some], axis=1)
    logprobs = np.take_along_axis(full[positions], ids, axis=1).astype(np.float32)
    return {"positions": positions.astype(np.int16), "ids": ids.astype(np.int16), "logprobs": logprobs}


def check_alive(name: str, recipe: Recipe, model: Any, tokens: list[int]) -> None:
    """Stops unless every weight and every listed config field matters to the log-probabilities."""
    base = oracle.log_probs(model, tokens)
    if not bool(base.isfinite().all()):
        raise SystemExit(f"{name}: log-probabilities are not finite")
    generator = torch.Generator().manual_seed(0)
    dead = []
    for weight, tensor in oracle.weights(model):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.add_(0.2 * kept.abs().mean() * torch.randn(kept.shape, generator=generator))
        moved = float((oracle.log_probs(model, tokens) - base).abs().max())
        with torch.no_grad():
            tensor.copy_(kept)
        if not moved >= LEAST_MOVE:
            dead.append(f"{weight} ({moved:.1e})")
    for field, value in recipe.changes.items():
        moved = float((oracle.log_probs(oracle.reconfigured(recipe, model, field, value), tokens) - base).abs().max())
        if not moved >= LEAST_MOVE:
            dead.append(f"config {field} ({moved:.1e})")
    if dead:
        raise SystemExit(f"{name}: these do not matter: {', '.join(dead)}")


def write_model(recipe: Recipe, model: Any, target: Path, prompt: list[int]) -> dict[str, np.ndarray]:
    """Config and weights as Hugging Face saves them, then the recipe's other spellings. Returns the drafts' goldens."""
    arrays: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        config = json.loads((Path(saved) / "config.json").read_text())
        tensors = load_file(Path(saved) / "model.safetensors")
    if recipe.modules:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if recipe.mtp and "mtp_layers_block_type" in recipe.config:
        tensors |= mtp_weights(recipe, tensors)
    elif recipe.mtp:
        makers = ling_drafts if "mtp_layer_types" in recipe.config else qwen_drafts
        drafts = makers.draft_weights(recipe, tensors)
        tensors |= drafts
        full = makers.draft_log_probs(model, drafts, prompt).numpy()
        kept = entries(full, np.random.default_rng(recipe.seed))
        arrays = {f"draft_{key}": array for key, array in kept.items()}
    if recipe.seeing:
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3, 2)
    stored = {}
    for weight, tensor in tensors.items():
        if recipe.rename_weights is not None:
            old, new = recipe.rename_weights
            moves = weight.startswith(old) and ".visual." not in weight
            weight = new + weight.removeprefix(old) if moves else weight
        stored[weight] = tensor if oracle.stays_float32(weight) else tensor.bfloat16()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    config["dtype"] = "bfloat16"
    if recipe.seeing:
        kind = config["model_type"].removesuffix("_text")
        config = {"model_type": kind, "text_config": config, "vision_config": {"model_type": kind, "depth": 1}}
    if recipe.mlp_sizes is not None:
        config["intermediate_size"] = list(recipe.mlp_sizes)
    for field, value in recipe.rename_config.items():
        config.pop(field, None)
        if value is not None:
            config[field] = value
    if recipe.literal_infinity:
        config = {
            key: [math.inf if isinstance(x, dict) else x for x in value] if isinstance(value, list) else value
            for key, value in config.items()
        }
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return arrays


def mtp_weights(recipe: Recipe, tensors: oracle.Tensors) -> oracle.Tensors:
    """Weights of a draft layer (attention, then MoE) as NVIDIA stores them; shapes are taken from the model's own."""
    hidden, kinds = recipe.config["hidden_size"], recipe.config["mtp_layers_block_type"]
    first, last = "mtp.layers.0.", f"mtp.layers.{len(kinds) - 1}."
    norms = (f"{first}enorm", f"{first}hnorm", f"{last}final_layernorm")
    shapes = {f"{norm}.weight": (hidden,) for norm in norms} | {f"{first}eh_proj.weight": (hidden, 2 * hidden)}
    alike = [recipe.config["layers_block_type"].index(kind) for kind in kinds]
    layers = {f"mtp.layers.{i}.": f"backbone.layers.{like}." for i, like in enumerate(alike)}
    return oracle.draft_weights(recipe, tensors, shapes, layers)


def make_rope(file: Path, heads: int = 4) -> None:
    """Writes frequencies and factors again, of cases that keep their parameters."""
    cases = json.loads(file.read_text())
    for case in cases.values():
        rope, positions = case["rope_parameters"], case["max_position_embeddings"]
        config = transformers.BambaConfig(
            hidden_size=heads * case["head_dim"], num_attention_heads=heads, max_position_embeddings=positions,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
        )  # fmt: skip
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=positions)
        case |= {"frequencies": [float(one) for one in frequencies], "scale": float(scale)}
    file.write_text(json.dumps(cases, indent=1))


def main(names: list[str]) -> None:
    if names == ["rope"]:
        return make_rope(Path(__file__).parent / "rope.json")
    torch.set_num_threads(1)
    unknown = sorted(set(names) - set(RECIPES))
    if unknown:
        raise SystemExit(f"no such fixture: {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    for name in names or RECIPES:
        make(name, RECIPES[name], Path(__file__).parent)


if __name__ == "__main__":
    main(sys.argv[1:])
