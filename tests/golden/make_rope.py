"""Computes `rope.json` again: frequencies and factors of its scaled rotary embeddings, by transformers.

cd tests && python -m golden.make_rope      (needs the `parity` extra)
"""

import json
from pathlib import Path

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HEADS = 4


def main() -> None:
    """Writes the file: each case keeps its parameters."""
    file = Path(__file__).parent / "rope.json"
    cases = json.loads(file.read_text())
    for case in cases.values():
        rope, positions = case["rope_parameters"], case["max_position_embeddings"]
        config = transformers.BambaConfig(
            hidden_size=HEADS * case["head_dim"],
            num_attention_heads=HEADS,
            max_position_embeddings=positions,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=positions)
        case |= {"frequencies": [float(one) for one in frequencies], "scale": float(scale)}
    file.write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    main()
