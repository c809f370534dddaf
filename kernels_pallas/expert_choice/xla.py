"""The choice of experts in plain JAX."""

import jax
import jax.numpy as jnp

from kernels_pallas.expert_choice.rule import Choice
from kernels_pallas.fixed_order import quotient, row_sum, softmax


def choose_experts(scores, bias, valid, first, *, own, rule):
    if bias is None and rule.num_groups == rule.top_groups:
        best, chosen = jax.lax.top_k(scores, rule.count)
    else:
        biased = _in_best_groups(scores if bias is None else scores + bias, rule)
        _, chosen = jax.lax.top_k(biased, rule.count)
        best = jnp.take_along_axis(scores, chosen, axis=1)
    if rule.weights == "softmax":
        weights = softmax(best)
    else:
        weights = quotient(best, row_sum(best) + 1e-20) if rule.normalize else best
        weights = weights if rule.scaling == 1.0 else weights * rule.scaling
    goes, number = valid[:, None], chosen
    if own < scores.shape[1]:
        # This device has some of the experts and skips tokens of other experts.
        number = chosen - first
        goes = goes & (number >= 0) & (number < own)
    # Padding is assigned to a nonexistent expert after all others: it costs nothing and gives zeros.
    expert = jnp.where(goes, number, own).reshape(-1)
    order = jnp.argsort(expert)
    # Counts by comparisons, because a search is a loop, which a GPU would run step by step from the host.
    sizes = (expert[:, None] == jnp.arange(own)).sum(axis=0, dtype=jnp.int32)
    return Choice(weights, chosen, order, jnp.argsort(order), sizes)


def _in_best_groups(scores, rule):
    """Scores of experts outside of the best groups become -inf; a group is as good as its best two together."""
    if rule.num_groups == rule.top_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], rule.num_groups, scores.shape[1] // rule.num_groups)
    of_group = row_sum(jax.lax.top_k(grouped, 2)[0])[..., 0]
    _, best = jax.lax.top_k(of_group, rule.top_groups)
    among = (best[:, :, None] == jnp.arange(rule.num_groups)).any(axis=1)
    return jnp.where(among[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
