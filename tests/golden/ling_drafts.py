"""The draft layer of Ling 3.0 by transformers' `MtpModel`; random weights with the names of inclusionAI's files."""

from typing import Any

import torch
from golden import oracle
from golden.oracle import Tensors
from golden.recipes import Recipe
from transformers.modeling_layers import MtpModel

FRAME = ("enorm", "hnorm", "eh_proj")


def draft_weights(recipe: Recipe, tensors: Tensors) -> Tensors:
    """Random weights of a layer shaped like the model's second one, which has attention and experts, and its frame."""
    hidden, layer = recipe.config["hidden_size"], f"model.layers.{recipe.config['num_hidden_layers']}."
    shapes = {f"{layer}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm")}
    shapes[f"{layer}eh_proj.weight"] = (hidden, 2 * hidden)
    return oracle.draft_weights(recipe, tensors, shapes, {layer: "model.layers.1."})


@torch.inference_mode()
def draft_log_probs(model: Any, drafts: Tensors, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens) - 1, vocab] of what follows token i + 1, by it and the hidden state of i."""
    layer = MtpModel(model, 1).float().eval()
    layer.config._attn_implementation = "eager"
    values = {name.split(".", 3)[3]: tensor for name, tensor in drafts.items()}
    values = {name: each if oracle.stays_float32(name) else each.bfloat16().float() for name, each in values.items()}
    layer.layers[0].load_state_dict(
        {theirs: values[ours] for theirs, ours in _names(values).items()} | _experts(values)
    )
    ids = torch.tensor([tokens])
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    positions = torch.arange(1, len(tokens))[None]
    out = layer.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
    return torch.log_softmax(model.lm_head(out)[0], dim=-1)


def _names(values: Tensors) -> dict[str, str]:
    """Names in transformers' module, and in a checkpoint, of all weights but the experts'."""
    found = {}
    for name in values:
        if ".experts." in name and "shared" not in name:
            continue
        theirs = name.replace("attention.", "self_attn.", 1) if name.startswith("attention.") else name
        theirs = theirs.replace("self_attn.dense", "self_attn.o_proj").replace("expert_bias", "e_score_correction_bias")
        theirs = theirs.replace("final_layernorm", "post_norm")
        if theirs.split(".")[0] not in (*FRAME, "post_norm"):
            theirs = f"mtp_block.{theirs}"
        found[theirs] = name
    return found


def _experts(values: Tensors) -> Tensors:
    count = 1 + max(int(name.split(".")[2]) for name in values if name.startswith("mlp.experts."))
    each = [[values[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(count)]
    together = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
    return {
        "mtp_block.mlp.experts.gate_up_proj": together,
        "mtp_block.mlp.experts.down_proj": torch.stack([down for *_, down in each]),
    }
