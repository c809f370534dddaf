"""Makes `rope.json`: frequencies and factors that transformers computes for scaled rotary embeddings.

cd tests && python -m golden.make_rope      (needs the `parity` extra)
"""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

POSITIONS, HEADS, HEAD_DIM = 1024, 4, 32
THETA = 10_000.0
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 1.0,
        "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "longrope": {
        "rope_type": "longrope", "long_factor": [1.0 + 0.3 * i for i in range(HEAD_DIM // 2)],
        "short_factor": [1.0] * (HEAD_DIM // 2), "original_max_position_embeddings": 128,
    },
}  # fmt: skip


def main() -> None:
    """Writes the file."""
    found = {}
    for name, rope in CASES.items():
        config = transformers.BambaConfig(
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            rope_parameters={**rope, "rope_theta": THETA, "partial_rotary_factor": 1.0},
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=POSITIONS)
        found[name] = {
            "rope_parameters": {**rope, "rope_theta": THETA},
            "max_position_embeddings": POSITIONS,
            "head_dim": HEAD_DIM,
            "frequencies": [float(one) for one in frequencies],
            "scale": float(scale),
        }
    (Path(__file__).parent / "rope.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
