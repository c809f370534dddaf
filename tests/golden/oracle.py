"""Hugging Face transformers as the oracle: random models that are alive in every part, and their log-probabilities.

Needs the `parity` extra. Caveats of the oracle: eager attention, no cache (its cached path is another code path), and
`time_step_min` near 0 in the config (it clamps dt from below, in the chunked path only).
"""

import copy
import math
from typing import Any

import torch
import transformers
from golden.recipes import Recipe

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, ...]
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")


def build(recipe: Recipe) -> Any:
    """The recipe's model with random weights, in float32, every one a bfloat16 number unless it is tiny."""
    torch.manual_seed(recipe.seed)
    model = _model(recipe, recipe.config)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, tensor in weights(model):
            factor = math.prod(factor for part, factor in recipe.quieter.items() if part in name)
            tensor.copy_(factor * random_like(name, tensor.shape, generator, tied=model.config.tie_word_embeddings))
            if not stays_float32(name):
                tensor.copy_(tensor.bfloat16().float())
    return model


def reconfigured(recipe: Recipe, model: Any, field: str, value: Any) -> Any:
    """The same weights under a config with one field changed."""
    changed = _model(recipe, recipe.config | {field: value})
    changed.load_state_dict(model.state_dict())
    return changed


def _model(recipe: Recipe, config: dict[str, Any]) -> Any:
    """A model of the recipe's class, with whatever weights transformers gives it."""
    model_class = getattr(transformers, recipe.architecture)
    settings = model_class.config_class(**copy.deepcopy(config))
    settings._attn_implementation = "eager"
    model = model_class(settings).float().eval()
    if recipe.mlp_sizes is not None:
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMLP

        layers = [layer for layer in model.model.layers if layer.block_type == "mlp"]
        for layer, size in zip(layers, recipe.mlp_sizes, strict=True):
            layer.mixer = NemotronHMLP(model.config, intermediate_size=size)
    return model


def stays_float32(name: str) -> bool:
    """The handful of numbers that published checkpoints keep in float32, and so do the fixtures."""
    return name.endswith(("A_log", "dt_bias", ".D", *_ROUTER_BIASES))


@torch.inference_mode()
def log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens), vocab] of what follows each token."""
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def greedy(model: Any, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """The most likely continuation, and by how much each of its tokens beats the runner-up. No cache: recomputed."""
    tokens, gaps = list(tokens), []
    for _ in range(count):
        best = log_probs(model, tokens)[-1].topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[-count:], gaps


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Every distinct parameter, and the routers' correction biases, which are buffers."""
    buffers = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith(_ROUTER_BIASES)]
    return [*model.named_parameters(), *buffers]


def draft_weights(recipe: Recipe, tensors: Tensors, shapes: dict[str, Shape], layers: dict[str, str]) -> Tensors:
    """Random weights of these shapes, and of layers that are shaped like the model's: its prefix by the other one."""
    generator = torch.Generator().manual_seed(recipe.seed + 500)
    for layer, like in layers.items():
        shapes |= {layer + name.removeprefix(like): t.shape for name, t in tensors.items() if name.startswith(like)}
    return {name: random_like(name, shape, generator) for name, shape in sorted(shapes.items())}


def random_like(name: str, shape: Shape, generator: torch.Generator, *, tied: bool = False) -> torch.Tensor:
    """A random weight as the model would have one of this name."""
    normal, uniform = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        # The inverse of softplus, of a step size that is uniform on the logarithmic scale.
        low, high = math.log(0.002), math.log(0.1)
        step = torch.exp(low + (high - low) * uniform)
        return step + torch.log(-torch.expm1(-step))
    if name.endswith("A_log"):
        return torch.log(0.5 + (16.0 - 0.5) * uniform)
    if name.endswith(".D"):
        return 1 + 0.3 * normal
    if name.endswith(_ROUTER_BIASES):
        return 0.3 * normal
    if "conv1d" in name:
        return normal * (0.4 if name.endswith("weight") else 0.2)
    if "norm" in name.rsplit(".", 2)[-2] or len(shape) == 1:
        return 1 + 0.25 * normal
    if "embed" in name:
        return normal * (3.0 / math.sqrt(shape[-1]) if tied else 1.0)
    if "lm_head" in name:
        return 2.0 * normal / math.sqrt(shape[-1])
    if "gate.weight" in name or "router" in name:
        return 1.5 * normal / math.sqrt(shape[-1])
    if "q_proj" in name or "k_proj" in name:  # sharp attention: positions and scales shall show
        return 1.6 * normal / math.sqrt(shape[-1])
    return normal / math.sqrt(shape[-1])
