"""Makes a LoRA adapter for each golden fixture, and what transformers and PEFT compute with it.

    cd tests && python -m golden.make_adapters [NAME...]      (needs the `parity` extra and `peft`)

Each fixture of `NAMES` gets the directories that it names, as PEFT saves them, with random A and B for every linear
layer of the model that adapters can change here: `adapter`, `dora` with magnitudes, and `saved` with an embedding and a
head (`modules_to_save`), but few other layers. `logprobs.npz` is of the fixture's prompt of chunk+1 tokens:

    positions    [n]                   positions that are compared
    ids          [n, m]                vocabulary entries that are compared at each
    logprobs     [n, m] float32        their log-probabilities after that position's token
"""

import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from golden import oracle
from golden.make_goldens import draw_prompts, entries
from golden.recipes import RECIPES, Recipe

PROMPT = 4
NAMES = {
    "nemotronh-moe": ("adapter",), "nemotronh-latent": ("adapter",), "bamba": ("adapter", "dora"),
    "granite-dense": ("adapter",), "falconh1": ("adapter",), "mamba2": ("adapter",), "zamba2": ("adapter",),
    "qwen3next-dense": ("adapter",), "qwen35-moe": ("adapter",), "lfm2": ("adapter", "dora", "saved"),
    "olmo-hybrid": ("adapter",), "kimi": ("adapter",), "falconh1-norm": ("saved",),
}  # fmt: skip
LEAST_MOVE = 0.1
"""By how much the adapter must change some log-probability; the tests allow 2e-4."""
_NOT_ADAPTED = ("lm_head", "router", "gate", "kv_b_proj")
"""Last parts of the names of linear modules that are not adapted: heads, routers, and what attention absorbs."""
MIXERS_ONLY = ("qwen3next-dense",)
"""Fixtures without adapters of MLPs: PEFT would take their names for those of experts, whether there are any or not."""


def make(name: str, recipe: Recipe, number: int, root: Path, kind: str) -> None:
    """Writes one of a fixture's adapters."""
    model, tokens = oracle.build(recipe), draw_prompts(recipe)[PROMPT]
    base = oracle.log_probs(model, tokens)
    targets = [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path.split(".")[-1] not in _NOT_ADAPTED and "experts.0" not in path
    ]
    if name in MIXERS_ONLY:
        targets = [path for path in targets if ".mlp." not in path]
    if kind == "saved":
        targets = targets[:2]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=targets,
        use_rslora=number % 2 == 1,
        rank_pattern={targets[0].split(".", 1)[1]: 2},
        alpha_pattern={targets[1].split(".", 1)[1]: 7},
        init_lora_weights=False,
        use_dora=kind == "dora",
        modules_to_save=["embed_tokens", "lm_head"] if kind == "saved" else None,
    )
    _allow_all_layers()
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for path, tensor in adapted.named_parameters():
            if "lora_" in path or "modules_to_save" in path:
                # Uses of a shared block have equal adapters: only then is it one block with an adapter.
                name_of_all = re.sub(r"layers\.\d+\.shared_transformer", "shared", path)
                generator = torch.Generator().manual_seed(number + zlib.crc32(name_of_all.encode()))
                drawn = torch.randn(tensor.shape, generator=generator)
                if "magnitude" in path:
                    drawn = tensor * (1 + 0.1 * drawn)
                elif "modules_to_save" in path:
                    drawn = tensor + 0.3 * tensor.std() * drawn
                else:
                    drawn *= tensor.shape[1] ** -0.5 if "lora_A" in path else 0.03
                tensor.copy_(drawn.bfloat16().float())
    found = oracle.log_probs(adapted, tokens).numpy()
    move = float(np.abs(found - base.numpy()).max())
    if move < LEAST_MOVE:
        raise SystemExit(f"{name}: the adapter changes the log-probabilities by {move} only")
    target = root / name / kind
    adapted.to(torch.bfloat16).save_pretrained(target)
    (target / "README.md").unlink(missing_ok=True)
    np.savez_compressed(target / "logprobs.npz", **entries(found, np.random.default_rng(recipe.seed)))
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{name}: {len(targets)} modules, {size / 1e3:.0f} kB, changes log-probabilities by {move:.2f}", flush=True)


def _allow_all_layers() -> None:
    """PEFT refuses out_proj and conv1d of Mamba layers, because fused kernels bypass them. The oracle uses none."""
    from peft.tuners.lora import model as lora_model

    compatible: Any = "_check_lora_target_modules_mamba"
    for owner in (lora_model, sys.modules["peft.tuners.tuners_utils"]):
        if hasattr(owner, compatible):
            setattr(owner, compatible, lambda *args: None)


def main() -> None:
    """Writes the adapters named on the command line (`lfm2` or `lfm2/saved`), or all in `NAMES`."""
    for number, (name, kinds) in enumerate(NAMES.items()):
        for kind in kinds:
            if not sys.argv[1:] or {name, f"{name}/{kind}"} & set(sys.argv[1:]):
                make(name, RECIPES[name], number, Path(__file__).parent, kind)


if __name__ == "__main__":
    main()
