"""Recurrent models that are not supported, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "bailing_hybrid": ("Ling 3.0", "the gates and latent queries of its attention"),
    "bailing_moe_linear": ("Ling and Ring 2.0", "lightning attention"),
    "bailing_moe_v2_5": ("Ling and Ring 2.5 and 2.6", "lightning attention"),
    "falcon_mamba": ("Falcon-Mamba", "the Mamba-1 recurrence"),
    "glm5_next": ("GLM-5.3-Flash", "residual connections through attention"),
    "inkling_mm_model": ("Inkling", "short convolutions in attention and MLP layers"),
    "jamba": ("Jamba", "the Mamba-1 recurrence"),
    "kimi_k3": ("Kimi K3", "residual connections through attention, latent experts"),
    "lfm3": ("LFM3", "sliding attention windows"),
    "mamba": ("Mamba", "the Mamba-1 recurrence"),
    "minimax": ("MiniMax-Text-01 and M1", "lightning attention"),
    "minimax_text_01": ("MiniMax-Text-01", "lightning attention"),
    "nemotron_h_puzzle": ("Nemotron Puzzle", "blocks of different sizes"),
    "phi4flash": ("Phi-4-mini-flash", "the Mamba-1 recurrence, differential attention"),
    "plamo2": ("PLaMo 2", "its variant of Mamba-2"),
    "qwen4_exp": ("Qwen3.8-Flash-Next", "sparse attention, n-gram embeddings"),
    "recurrent_gemma": ("RecurrentGemma", "the RG-LRU recurrence"),
    "rwkv7": ("RWKV-7", "its recurrence"),
    "xlstm": ("xLSTM", "its recurrence"),
    "zamba": ("Zamba 1", "the Mamba-1 recurrence"),
}
"""The models, and what is missing."""
