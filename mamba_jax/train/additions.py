"""Parameters that are trained in addition to a model whose weights stay: LoRA adapters, and initial states.

They are entries of the same dictionary as the model's weights: `lora.{module}.a` [rank, inputs] of each module of the
checkpoint, `lora.{module}.b:{layer}` [outputs, rank] of each dense layer that is a part of it, `lora_scale`, which is
not trained, and `initial_state.{index}.{name}`, an array of the state before the first token, by the index of its block
and the name that the block declares.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mamba_jax.adapters import adaptable_layers
from mamba_jax.config import HybridConfig, ModelConfigError, Role, StateUnit
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel
from mamba_jax.modules.basic import LoRA

LORA, LORA_SCALE, INITIAL_STATE = "lora.", "lora_scale", "initial_state."
_PART = ".b:"


def is_trained(path: str) -> bool:
    """Returns whether a path is that of an addition that changes in training."""
    return path.startswith((LORA, INITIAL_STATE))


def new_adapter(
    config: HybridConfig, modules: Mapping[str, str], *, rank: int, alpha: float, seed: int
) -> dict[str, Array]:
    """Returns an adapter that changes nothing yet: A is random and B is zero (Hu et al., "LoRA", 2021, section 4.1).

    Args:
        modules: by the dotted path of each adapted dense layer, the module of the checkpoint that has it. Layers of one
            module share A.
        rank: of every layer.
        alpha: B A is multiplied by alpha / rank.
        seed: of A, which is uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs), as PEFT has it.
    Raises:
        ModelConfigError: `rank` or `alpha` is not positive.
    """
    if rank < 1 or not (alpha > 0 and math.isfinite(alpha)):
        raise ModelConfigError(f"rank {rank} and alpha {alpha}: a rank of at least 1 and an alpha above 0 are expected")
    shapes = {path: layer.weight.shape for path, layer in adaptable_layers(HybridModel.abstract(config)).items()}
    values: dict[str, Array] = {LORA_SCALE: jnp.float32(alpha / rank)}
    for number, (path, module) in enumerate(sorted(modules.items())):
        *outputs, inputs = shapes[path]
        key, bound = jax.random.fold_in(jax.random.key(seed), number), inputs**-0.5
        if f"{LORA}{module}.a" not in values:
            values[f"{LORA}{module}.a"] = jax.random.uniform(key, (rank, inputs), minval=-bound, maxval=bound)
        values[f"{LORA}{module}{_PART}{path}"] = jnp.zeros((math.prod(outputs), rank))
    return values


def adapter_modules(values: Mapping[str, Array]) -> dict[str, tuple[Array, dict[str, Array]]]:
    """Returns A of each adapted module, and B, without the scale, of each layer that is a part of it."""
    modules: dict[str, tuple[Array, dict[str, Array]]] = {}
    for path, value in values.items():
        module, part, layer = path.removeprefix(LORA).partition(_PART)
        if path.startswith(LORA) and part:
            modules.setdefault(module, (values[f"{LORA}{module}.a"], {}))[1][layer] = value
    return modules


def new_initial_states(config: HybridConfig, *, windows: bool = False) -> dict[str, Array]:
    """Returns initial states of zeros, for every recurrence, and with `windows` for the windows of convolutions.

    Raises:
        ModelConfigError: the model has no such state.
    """
    roles = {Role.ACCUMULATED, Role.WINDOW} if windows else {Role.ACCUMULATED}
    values = {}
    for index, kind in enumerate(config.pattern):
        for array in config.state(kind, StateUnit.SLOT):
            if array.role in roles:
                values[f"{INITIAL_STATE}{index}.{array.name}"] = jnp.zeros(array.shape)
    if not values:
        hint = "" if windows else "; train the windows of its convolutions (--windows)"
        raise ModelConfigError(f"{config.family}: the model has no recurrent states{hint}")
    return values


def initial_states(values: Mapping[str, Array]) -> dict[int, dict[str, Array]]:
    """Returns the arrays of initial states by the index of the block and the array's name."""
    found: dict[int, dict[str, Array]] = {}
    for path, value in values.items():
        if path.startswith(INITIAL_STATE):
            index, _, name = path.removeprefix(INITIAL_STATE).partition(".")
            found.setdefault(int(index), {})[name] = value
    return found


def divide(values: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the model's weights, and the additions."""
    added = {path: value for path, value in values.items() if is_trained(path) or path == LORA_SCALE}
    return {path: value for path, value in values.items() if path not in added}, added


def attach(model: HybridModel, layout: SequenceLayout, added: Mapping[str, Array]) -> SequenceLayout:
    """Adds an adapter to a model's layers. Returns the layout with which the model uses all additions."""
    if LORA_SCALE in added:
        layers = adaptable_layers(model)
        for a, parts in adapter_modules(added).values():
            for path, b in parts.items():
                outputs = layers[path].weight.shape[:-1]
                scaled = (added[LORA_SCALE] * b).reshape(*outputs, 1, -1)
                layers[path].lora = LoRA(a[None].astype(model.dtype), scaled.astype(model.dtype))
        layout = dataclasses.replace(layout, adapter=jnp.zeros(layout.positions.shape, jnp.int32))
    states = initial_states(added)
    return dataclasses.replace(layout, initial_states=states) if states else layout
