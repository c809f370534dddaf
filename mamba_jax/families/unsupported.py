"""Recurrent models that are not supported, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "bailing_moe_linear": ("Ling and Ring 2.0", "norms and rotary positions in lightning attention"),
    "bailing_moe_v2_5": (
        "Ling and Ring 2.5 and 2.6",
        "norms and rotary positions in lightning attention, rotary latent attention",
    ),
    "gigachat35": ("GigaChat 3.5", "gated delta nets together with latent attention, and a reference implementation"),
    "glm5_next": ("GLM-5.3-Flash", "residual connections through attention"),
    "inkling_mm_model": ("Inkling", "short convolutions in attention and MLP layers"),
    "inkling2": ("Inkling 2", "short convolutions in attention and MLP layers"),
    "kimi_k3": ("Kimi K3", "residual connections through attention, latent experts"),
    "nemotron_h_puzzle": ("Nemotron Puzzle", "blocks of different sizes"),
    "phi4flash": ("Phi-4-mini-flash", "differential attention, memory units that share a state"),
    "plamo2": ("PLaMo 2", "its variant of Mamba-2"),
    "plamo3": ("PLaMo 3", "a reference implementation to compare with"),
    "qwen4_exp": ("Qwen3.8-Flash-Next", "sparse attention, n-gram embeddings"),
    "rwkv": ("RWKV-4", "its recurrence"),
    "rwkv7": ("RWKV-7", "its recurrence"),
    "xlstm": ("xLSTM", "its recurrence"),
    "zamba": ("Zamba 1", "heads in the Mamba-1 recurrence"),
    "zaya": ("ZAYA", "its convolutional attention"),
}
"""The models, and the missing features."""
