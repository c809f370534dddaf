"""The draft layer of NVIDIA's models, which transformers leaves out: blocks of transformers' own, the rest in torch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

LAYER = "mtp.layers."
AROUND = ("enorm", "hnorm", "eh_proj", "final_layernorm")


class DraftLayer:
    """The draft layer of a checkpoint with float32 weights, next to the model itself.

    Its blocks are read as if they were the model's last two, so that transformers gives experts the form it wants.
    """

    def __init__(self, model: Any, directory: Path, scratch: Path) -> None:
        self.model = model
        shutil.copytree(directory, scratch)
        tensors = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        count, kinds = len(config["layers_block_type"]), config["mtp_layers_block_type"]
        config |= {"layers_block_type": config["layers_block_type"] + kinds, "num_hidden_layers": count + len(kinds)}
        (prefix,) = {name.split(".layers.")[0] for name in tensors if ".layers.0." in name and LAYER not in name}
        self.around: dict[str, torch.Tensor] = {}
        moved: dict[str, np.ndarray] = {}
        for name, tensor in tensors.items():
            if not name.startswith(LAYER):
                moved[name] = tensor
                continue
            number, rest = name.removeprefix(LAYER).split(".", 1)
            if rest.startswith(AROUND):
                self.around[rest.removesuffix(".weight")] = torch.from_numpy(tensor)
            else:
                moved[f"{prefix}.layers.{count + int(number)}.{rest}"] = tensor
        save_file(moved, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config))
        longer = type(model).from_pretrained(scratch, dtype=torch.float32, attn_implementation="eager").eval()
        self.blocks = longer.model.layers[count:]

    @torch.inference_mode()
    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities [len(tokens) - 1, vocab] of what follows token i + 1, by it and the hidden state of i."""
        ids = torch.tensor([tokens])
        hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        embedded = self.model.model.embeddings(ids[:, 1:])
        pairs = torch.cat([self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")], dim=-1)
        x = torch.nn.functional.linear(pairs, self.around["eh_proj"])
        later = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        for block in self.blocks:
            x = block(x, attention_mask=later)
        return torch.log_softmax(self.model.lm_head(self._norm(x, "final_layernorm"))[0], dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.layer_norm_epsilon)
        return x * scale * self.around[name]
