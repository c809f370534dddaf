"""The draft layer of Alibaba's models, which transformers leaves out: random weights, and a forward in plain torch."""

import torch
from golden import oracle
from golden.oracle import Tensors
from golden.recipes import Recipe
from torch.nn import functional

LAYER = "mtp.layers.0."


def draft_weights(recipe: Recipe, tensors: Tensors) -> Tensors:
    """Random weights of a layer shaped like the model's last one, and of what lies around it."""
    hidden, last = recipe.config["hidden_size"], f"model.layers.{recipe.config['num_hidden_layers'] - 1}."
    shapes = {f"mtp.{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    found = oracle.draft_weights(recipe, tensors, shapes, {LAYER: last})
    return {name: 0.2 * tensor if "norm" in name else tensor for name, tensor in found.items()}


@torch.inference_mode()
def draft_log_probs(model, drafts: Tensors, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens) - 1, vocab] of what follows token i + 1, by it and the hidden state of i."""
    eps = model.config.rms_norm_eps

    def norm(x, name):
        weight = drafts[name].bfloat16().float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)

    def linear(x, name):
        return functional.linear(x, drafts[name].bfloat16().float())

    ids = torch.tensor(tokens)
    hidden = model.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
    pair = norm(model.model.embed_tokens(ids[1:]), "mtp.pre_fc_norm_embedding.weight")
    pair = torch.cat([pair, norm(hidden, "mtp.pre_fc_norm_hidden.weight")], dim=-1)
    x = linear(pair, "mtp.fc.weight")
    x = x + _attention(model.config, norm(x, LAYER + "input_layernorm.weight"), linear, norm)
    x = x + _feed_forward(model.config, norm(x, LAYER + "post_attention_layernorm.weight"), linear, drafts)
    return torch.log_softmax(model.lm_head(norm(x, "mtp.norm.weight")), dim=-1)


def _attention(config, x, linear, norm):
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    name = LAYER + "self_attn."
    q, gate = linear(x, name + "q_proj.weight").view(-1, heads, 2 * size).chunk(2, dim=-1)
    k, v = (linear(x, f"{name}{part}_proj.weight").view(-1, kv_heads, size) for part in "kv")
    q, k = norm(q, name + "q_norm.weight"), norm(k, name + "k_norm.weight")
    q, k = (_rotate(one, config) for one in (q, k))
    k, v = (one.repeat_interleave(heads // kv_heads, dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return linear((out * gate.sigmoid()).flatten(1), name + "o_proj.weight")


def _rotate(x, config):
    rope = config.rope_parameters
    size = int(config.head_dim * rope["partial_rotary_factor"])
    frequency = rope["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
    angle = (torch.arange(len(x))[:, None] * frequency)[:, None]
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _feed_forward(config, x, linear, drafts):
    def swiglu(x, name):
        return linear(
            functional.silu(linear(x, name + "gate_proj.weight")) * linear(x, name + "up_proj.weight"),
            name + "down_proj.weight",
        )

    name = LAYER + "mlp."
    if name + "gate.weight" not in drafts:
        return swiglu(x, name)
    best, chosen = linear(x, name + "gate.weight").topk(config.num_experts_per_tok, dim=-1)
    shares = best.softmax(-1)
    out = linear(x, name + "shared_expert_gate.weight").sigmoid() * swiglu(x, name + "shared_expert.")
    for token in range(len(x)):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            out[token] += share * swiglu(x[token], f"{name}experts.{expert}.")
    return out
