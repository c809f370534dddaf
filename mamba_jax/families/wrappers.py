"""Text models inside multimodal checkpoints: their part of config.json, and the names of their tensors.

Only text is served, so tensors of the other towers (vision, audio, projectors) are left out.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from mamba_jax.config import ModelConfigError

TEXT_KEYS = ("text_config", "llm_config")
"""Fields of config.json that hold the text model's config, possibly nested."""

WRAPPER = "wrapper_model_type"
"""The field of `text_fields` that holds the outermost `model_type` of a config.json with a text model's part."""

TEXT_PREFIXES = ("language_model.", "llm.")
"""Prefixes of the text model's tensors that come before the names which the model has by itself."""

OTHER_TOWERS = (
    r"(?:model\.)?((?:vision|audio|video|image|sound|speech)(?:_\w+)?|visual|vpm|apm|resampler|mlp1|merger|vit_merger"
    r"|multi_modal_projector|mm_projector|time_series|embed_(?:vision|audio))(?:\..*)?"
)
"""Regular expression (full match) of tensors of other towers; its group is the tower."""


def text_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields of a config.json: those under `TEXT_KEYS`, then the outer ones that they do not set.

    `model_type` is the outer one where the text model's config has none.

    Raises:
        ModelConfigError: the value under such a key is not an object.
    """
    while (key := next((key for key in TEXT_KEYS if raw.get(key) is not None), None)) is not None:
        text = raw[key]
        if not isinstance(text, Mapping):
            raise ModelConfigError(f"config field {key} is {text!r}: an object is expected")
        wrapper = raw.get(WRAPPER, raw.get("model_type"))
        raw = {**{name: value for name, value in raw.items() if name != key}, **text}
        if wrapper is not None and wrapper != raw.get("model_type"):
            raw[WRAPPER] = wrapper
    return raw


def other_towers(names: Iterable[str]) -> dict[str, int]:
    """Returns how many of these tensors belong to each of the other towers."""
    found = (re.fullmatch(OTHER_TOWERS, name) for name in names)
    return dict(sorted(Counter(match[1] for match in found if match is not None).items()))
