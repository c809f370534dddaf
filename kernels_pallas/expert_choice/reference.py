"""The definition of the choice of experts, in numpy: one token after the other."""

import numpy as np

from kernels_pallas.expert_choice.rule import Choice


def choose_experts(scores, bias, valid, first, *, own, rule):
    """See `api.choose_experts`. Weights are float64."""
    scores = np.asarray(scores)
    # The sum that decides is float32, as implementations round it.
    biased = scores if bias is None else scores + np.asarray(bias, np.float32)
    weights, chosen = [], []
    for token, values in zip(biased, scores.astype(np.float64), strict=True):
        groups = np.split(token, rule.num_groups)
        of_group = np.array([np.sort(group)[-2:].sum(dtype=np.float32) for group in groups])
        best = _largest(of_group, rule.top_groups)
        size = len(token) // rule.num_groups
        there = np.isin(np.arange(len(token)) // size, best)
        mine = _largest(np.where(there, token, -np.inf), rule.count)
        chosen.append(mine)
        weights.append(_weights(values[mine], rule))
    local = np.array(chosen) - (first if own < scores.shape[1] else 0)
    local[~np.asarray(valid)] = own
    rows = np.where((local >= 0) & (local < own), local, own).reshape(-1)
    order = sorted(range(len(rows)), key=lambda row: (rows[row], row))
    place = np.argsort(order)
    sizes = np.array([(rows == expert).sum() for expert in range(own)])
    return Choice._make([np.array(weights), np.array(chosen), np.array(order), place, sizes])


def _largest(values, count):
    """Indices of the largest values, the first of equal ones first; -0 is less than 0."""
    return sorted(range(len(values)), key=lambda n: (-values[n], np.signbit(values[n]), n))[:count]


def _weights(values, rule):
    if rule.weights == "softmax":
        shares = np.exp(values - values.max())
        return shares / shares.sum()
    return rule.scaling * (values / (values.sum() + 1e-20) if rule.normalize else values)
