"""The optimizer: clipping, AdamW or Muon, and a schedule of the learning rate."""

import re

import jax
import optax
from optax import contrib

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import OptimizerSettings

# Linear maps between hidden spaces. AdamW updates all others (embedding, head, convolutions, norms, parameters of
# recurrences, routers).
_MUON = re.compile(r".*\.(in_proj_zx|in_proj_bc|out_proj|[qkvo]_proj|gate_proj|up_proj|down_proj|eh_proj)\.weight")
# Scales Muon's updates to the size of Adam's, so that both use one learning rate (Liu et al., 2025).
_MUON_RMS = 0.2


def learning_rate(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Returns the learning rate of each step.

    Raises:
        ModelConfigError: warm-up and decay take more steps than the run has.
    """
    warmup, peak = settings.warmup_steps, settings.learning_rate
    if warmup + settings.decay_steps > steps:
        raise ModelConfigError(
            f"optimizer.warmup_steps is {warmup} and optimizer.decay_steps is {settings.decay_steps}: there are only "
            f"{steps} steps; lower them, or set more steps"
        )
    rise = optax.linear_schedule(0.0, peak, warmup)
    if settings.schedule == "cosine":
        return optax.join_schedules([rise, optax.cosine_decay_schedule(peak, max(steps - warmup, 1))], [warmup])
    start = steps - settings.decay_steps
    fall = optax.linear_schedule(peak, 0.0, max(settings.decay_steps, 1))
    return optax.join_schedules([rise, optax.constant_schedule(peak), fall], [warmup, start])


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of weights by dotted path."""
    rate, (beta1, beta2) = learning_rate(settings, steps), settings.betas
    update: optax.GradientTransformation
    if settings.name == "adamw":
        update = optax.adamw(rate, beta1, beta2, weight_decay=settings.weight_decay, mask=_decayed)
    else:
        adam = settings.adamw_learning_rate
        factor = 1.0 if adam is None else adam / settings.learning_rate
        update = contrib.muon(
            rate, weight_decay=settings.weight_decay, adam_b1=beta1, adam_b2=beta2,
            muon_weight_dimension_numbers=_muon_dimensions, adam_learning_rate=lambda step: rate(step) * factor,
            consistent_rms=_MUON_RMS,
        )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), update)


def _decayed(values: dict[str, jax.Array]) -> dict[str, bool]:
    """Matrices decay; norms, biases, convolutions and parameters of recurrences do not."""
    return {path: value.ndim >= 2 and ".conv_" not in path for path, value in values.items()}


def _muon_dimensions(values: dict[str, jax.Array]) -> dict[str, contrib.MuonDimensionNumbers | None]:
    """Weights are [..., out, in]; the leading axes enumerate matrices."""
    return {
        path: contrib.MuonDimensionNumbers(value.ndim - 1, value.ndim - 2) if _MUON.fullmatch(path) else None
        for path, value in values.items()
    }
