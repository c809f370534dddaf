"""Small drafters for the models of tests, and the formulas of EAGLE-3, DFlash, DFlash 2 and DSpark in numpy."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from mamba_jax.config import HybridConfig
from mamba_jax.layout import SequenceLayout
from tests.support.models import tiny_configs

LONGEST = 32
"""Tokens of the sequences that tests look at."""

EAGLE = dataclasses.replace(
    tiny_configs.EAGLE,
    hidden_size=20,
    places=(1, 3, 4),
    attention=dataclasses.replace(tiny_configs.EAGLE.attention, input_size=20),
)
"""Keys of another shape than the target's, a vocabulary of its own, and rotary positions."""
EAGLE_NORMED = dataclasses.replace(EAGLE, normed_residual=True, norms_states=True, num_layers=2)
FLASH = dataclasses.replace(
    tiny_configs.FLASH, hidden_size=24, vocab_size=61, places=(2, 5),
    attention=dataclasses.replace(tiny_configs.FLASH.attention, input_size=24, num_kv_heads=2), mask_token=60,
)  # fmt: skip
"""With the embedding and the head of the target, which has 24 channels and 61 tokens."""
SPARK = dataclasses.replace(
    FLASH, vocab_size=40, own_embedding=True, own_head=True, maps_vocabulary=True, markov_rank=5, from_newest=True,
    embedding_multiplier=1.5, estimates=True, estimates_by_token=True,
)  # fmt: skip
FLASH2 = dataclasses.replace(
    FLASH, attention=dataclasses.replace(FLASH.attention, window=9), conv_kernel=2, conv_group=4, selector_rank=5,
    selector_top=7, logit_multiplier=0.5, logit_cap=2.0,
)  # fmt: skip
"""With windows that are shorter than the sequences."""


def norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, positions, rope):
    """Each head's halves, turned by angles that grow with the position."""
    half = rope.size // 2
    angles = positions[:, None] / rope.theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half : rope.size]
    turned = [first * cos - second * sin, second * cos + first * sin, x[..., rope.size :]]
    return np.concatenate(turned, axis=-1)


def attention_part(w, at, y, config, positions):
    """Queries, keys and values [tokens, heads, head_dim] of one layer."""
    a = config.attention
    q, k, v = (
        (y @ w[f"{at}attention.{name}_proj.weight"].T).reshape(len(y), heads, a.head_dim)
        for name, heads in (("q", a.num_heads), ("k", a.num_kv_heads), ("v", a.num_kv_heads))
    )
    if a.qk_norm is not None:
        q, k = (norm(x, w[f"{at}attention.{name}_norm.weight"], a.qk_norm.eps) for x, name in ((q, "q"), (k, "k")))
    return rotate(q, positions, a.rope), rotate(k, positions, a.rope), v


def mix(q, k, v, scale, seen):
    """Attention of queries to the keys that `seen` [queries, keys] says."""
    out = np.zeros_like(q)
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        scores = np.where(seen, scale * q[:, head] @ k[:, shared].T, -np.inf)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = e / e.sum(-1, keepdims=True) @ v[:, shared]
    return out.reshape(len(q), -1)


def feed(w, at, x):
    gate, up = (x @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up @ w[f"{at}mlp.down_proj.weight"].T


def weights(values):
    """A drafter's weights by path, in float64."""
    return {
        name.removeprefix("drafter."): np.asarray(value, np.float64)
        for name, value in values.items()
        if name.startswith("drafter.")
    }


@functools.cache
def _states(model):
    def run(tokens):
        layout, x, passed = SequenceLayout.of(1, LONGEST), model.embedded(tokens), []
        for index, sublayer in enumerate(model.blocks):
            passed.append(x)
            state = (None, None) if sublayer.kind == "P" else None
            x, _ = sublayer(x, layout.of_block(index), state)
        return [*passed, x]

    return jax.jit(run)


def states_of(model, tokens):
    """The target's residual stream [tokens, hidden] before each sublayer and after the last, sublayer by sublayer."""
    padded = np.zeros(LONGEST, np.int64)  # one length for all: each would be compiled anew
    padded[: len(tokens)] = tokens
    return [np.asarray(state)[: len(tokens)] for state in _states(model)(padded)]


def features(w, config, states):
    """What a drafter reads, from the target's hidden states at each place [tokens, hidden]."""
    joined = np.concatenate([np.asarray(state, np.float64) for state in states], axis=-1)
    if getattr(config, "norms_states", False):
        joined = norm(joined, w["states_norm.weight"], config.norm_eps)
    return joined @ w["fc.weight"].T


def eagle(w, config, pairs):
    """EAGLE-3 over pairs (hidden state, next token), all at once.

    Returns the outputs that the next pass reads, logits over the draft vocabulary, and each layer's keys and values.
    """
    x = np.array([hidden for hidden, _ in pairs], np.float64)
    embedded = w["embed.weight"][[token for _, token in pairs]]
    positions, count, cache = np.arange(len(pairs)), len(pairs), []
    for i in range(config.num_layers):
        at = f"layers.{i}."
        read = norm(embedded if i == 0 else x, w[f"{at}attention_norm.weight"], config.norm_eps)
        if i == 0:
            normed = norm(x, w[f"{at}hidden_norm.weight"], config.norm_eps)
            read = np.concatenate([read, normed], axis=-1)
            x = normed if config.normed_residual else x
        q, k, v = attention_part(w, at, read, config, positions)
        mixed = mix(q, k, v, config.attention.scale, np.tril(np.ones((count, count), bool)))
        x = x + mixed @ w[f"{at}attention.o_proj.weight"].T
        x = x + feed(w, at, norm(x, w[f"{at}mlp_norm.weight"], config.norm_eps))
        cache.append((k, v))
    logits = norm(x, w["final_norm.weight"], config.norm_eps) @ w["lm_head.weight"].T
    return x, logits, cache


def context(w, config, read):
    """Each layer's keys and values of tokens that the target has read, from what `features` makes of them."""
    read = norm(read, w["states_norm.weight"], config.norm_eps)
    positions = np.arange(len(read))
    return [attention_part(w, f"layers.{i}.", read, config, positions)[1:] for i in range(config.num_layers)]


def convolved(w, at, config, x, read, part):
    """DFlash 2: a convolution over the tokens of a block, with factors that tokens of `read` add to."""
    factors = (read @ w[f"{at}projection.weight"].T).reshape(len(x), 2, config.conv_kernel, -1)[:, part]
    total = np.zeros_like(x)
    for back in range(config.conv_kernel):
        earlier = np.concatenate([np.zeros_like(x[:back]), x[: len(x) - back]])
        total += (w[f"{at}base"][part, back] + np.repeat(factors[:, back], config.conv_group, axis=1)) * earlier
    return total


def block(w, config, read, newest, count, embed, head):
    """DFlash and DSpark: outputs and logits at each token of a block that follows the tokens of `read`, which see each
    other."""
    tokens = [newest, *[config.mask_token] * (count - config.from_newest)]
    x = config.embedding_multiplier * embed[tokens]
    positions = len(read) + np.arange(len(tokens))
    for i, (keys, values) in enumerate(context(w, config, read)):
        at = f"layers.{i}."

        def around(name, sublayer, x, at=at):
            y = norm(x, w[f"{at}{name}_norm.weight"], config.norm_eps)
            if not config.conv_kernel:
                return x + sublayer(y)
            conv = functools.partial(convolved, w, f"{at}{name}_conv.", config, read=y)
            return x + conv(x=sublayer(conv(x=y, part=0)), part=1)

        def attend(y, at=at, keys=keys, values=values):
            q, k, v = attention_part(w, at, y, config, positions)
            k, v = np.concatenate([keys, k]), np.concatenate([values, v])
            seen = positions[:, None] - np.arange(len(k)) < (config.attention.window or len(k))
            return mix(q, k, v, config.attention.scale, seen) @ w[f"{at}attention.o_proj.weight"].T

        x = around("attention", attend, x)
        x = around("mlp", lambda y, at=at: feed(w, at, y), x)
    out = norm(x, w["final_norm.weight"], config.norm_eps)[-count:]
    return out, out @ head.T


def following(w, config, logits, hidden, before):
    """Logits of the token after the token `before` of a block, and how likely the largest is right."""
    logits = logits * config.logit_multiplier
    logits = np.tanh(logits / config.logit_cap) * config.logit_cap if config.logit_cap else logits
    if config.markov_rank:
        logits = logits + w["markov_after.weight"] @ w["markov_before.weight"][before]
    if config.selector_rank:
        left = np.argsort(logits)[: -config.selector_top]
        read = w["selector.before.weight"][before] * (w["selector.hidden.weight"] @ hidden)
        logits = logits + w["selector.after.weight"] @ read
        logits[left] = -np.inf
    if not config.estimates:
        return logits, 1.0
    known = np.concatenate([hidden, w["markov_before.weight"][before]]) if config.estimates_by_token else hidden
    return logits, 1 / (1 + np.exp(-(w["confidence.weight"][0] @ known + w["confidence.bias"][0])))


def with_tokens(config: HybridConfig, model):
    """The model, whose drafter's vocabulary is every other token or so of the target's."""
    count = model.drafter.tokens[...].shape[0]
    chosen = np.sort(np.random.default_rng(5).permutation(config.vocab_size)[:count])
    model.drafter.tokens[...] = chosen.astype(np.int32)
    return model


def _written(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class _DrafterTensors:
    """Random tensors of a drafter with Llama's or Qwen3's layers, and its fields of config.json."""

    heads, kv_heads, middle, head_dim = 4, 2, 24, 6

    def __init__(self, target: HybridConfig, seed: int) -> None:
        self.rng, self.size = np.random.default_rng(seed), target.hidden_size
        self.fields = {
            "hidden_size": self.size, "intermediate_size": self.middle, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "num_hidden_layers": 1,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": target.vocab_size,
        }  # fmt: skip

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return (self.rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(self, size: int | None = None) -> np.ndarray:
        return (1 + 0.1 * self.rng.normal(size=size or self.size)).astype(np.float32)

    def layer(self, name: str, inputs: int) -> dict[str, np.ndarray]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"self_attn.q": (queries, inputs), "self_attn.k": (keys, inputs), "self_attn.v": (keys, inputs)}
        shapes |= {"self_attn.o": (self.size, queries), "mlp.gate": (self.middle, self.size)}
        shapes |= {"mlp.up": (self.middle, self.size), "mlp.down": (self.size, self.middle)}
        found = {f"{name}.{part}_proj.weight": self.matrix(*shape) for part, shape in shapes.items()}
        return found | {f"{name}.{norm}_layernorm.weight": self.norm() for norm in ("input", "post_attention")}


def write_eagle(folder: Path, target: HybridConfig, *, form: str = "eagle", seed: int = 0) -> Path:
    """Writes a random EAGLE-3 drafter in one of the two published forms."""
    made, vocab = _DrafterTensors(target, seed), target.vocab_size // 2
    layer = "midlayer" if form == "eagle" else "layers.0"
    tensors = {
        "fc.weight": made.matrix(made.size, 3 * made.size), "lm_head.weight": made.matrix(vocab, made.size),
        "d2t": np.arange(vocab), "t2d": np.zeros(target.vocab_size, bool), "norm.weight": made.norm(),
        f"{layer}.hidden_norm.weight": made.norm(), **made.layer(layer, 2 * made.size),
    }  # fmt: skip
    own: dict[str, Any] = {"draft_vocab_size": vocab, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    if form == "eagle":
        return _written(folder, tensors, {**made.fields, **own, "architectures": ["LlamaForCausalLMEagle3"]})
    own |= {"transformer_layer_config": made.fields, "speculators_model_type": "eagle3", "norm_before_residual": False}
    return _written(folder, tensors, own | {"architectures": ["Eagle3DraftModel"]})


def write_block(folder: Path, target: HybridConfig, *, method: str) -> Path:
    """Writes a random DFlash, DFlash 2 or DSpark drafter with two layers, as published."""
    made, rank = _DrafterTensors(target, seed=0), 5
    tensors = {"fc.weight": made.matrix(made.size, 2 * made.size)}
    tensors |= {f"{name}.weight": made.norm() for name in ("hidden_norm", "norm")}
    for layer in ("layers.0", "layers.1"):
        tensors |= made.layer(layer, made.size)
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": made.norm(made.head_dim) for name in ("q", "k")}
    config = {**made.fields, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    if method.startswith("dflash"):
        own: dict[str, Any] = {"target_layer_ids": [0, 2], "mask_token_id": target.vocab_size - 1, "block_size": 8}
        if method == "dflash":
            return _written(folder, tensors, config | {"architectures": ["DFlashDraftModel"], "dflash_config": own})
        own |= {"conv_group_size": 4, "conv_kernel_size": 2, "selector_rank": rank, "selector_top_k": 6}
        own |= {"final_logit_softcapping": 20.0, "output_multiplier": 0.5}
        for conv in (f"layers.{layer}.{name}_conv" for layer in (0, 1) for name in ("attention", "mlp")):
            tensors[f"{conv}.base_kernel"] = made.rng.normal(size=(2, 2, made.size)).astype(np.float32)
            tensors[f"{conv}.kernel_projection.weight"] = made.matrix(made.size, made.size)
        for name in ("predecessor", "successor"):
            tensors[f"candidate_selector.{name}_codebook"] = made.matrix(target.vocab_size, rank)
        tensors["candidate_selector.hidden_projection.weight"] = made.matrix(rank, made.size)
        config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16, "use_sliding_window": True}
        config |= {"is_causal": False, "architectures": ["DFlash2DraftModel"], "dflash_config": own}
        return _written(folder, tensors, config)
    tensors |= {
        "markov_head.markov_w1.weight": made.matrix(target.vocab_size, rank),
        "markov_head.markov_w2.weight": made.matrix(target.vocab_size, rank),
        "confidence_head.proj.weight": made.matrix(1, made.size + rank),
        "confidence_head.proj.bias": np.ones(1, np.float32),
    }
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    config |= {"target_layer_ids": [0, 2], "mask_token_id": target.vocab_size - 1, "markov_rank": rank}
    return _written(folder, tensors, config | {"architectures": ["Qwen3DSparkModel"]})
