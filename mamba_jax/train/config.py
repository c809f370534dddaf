"""The settings of a training run, read from a YAML or TOML file."""

import dataclasses
import json
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml

from mamba_jax.config import ModelConfigError

FINE_TUNING = Path(__file__).parent / "recipes" / "fine-tune.yaml"
"""Settings for fine-tuning an existing model, used where no others are given."""

_CHECKS = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _number(value: Any) -> Any:
    """Returns the number that a text spells, if any: YAML reads 1e-3, which has no point, as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Number = Annotated[float, pydantic.BeforeValidator(_number)]


@dataclass(frozen=True)
class DataSettings:
    """The documents of the training data, and their proportions."""

    __pydantic_config__ = _CHECKS

    corpus: str = "corpus"
    """A directory with `train/SOURCE.jsonl`; relative to the working directory."""
    mixture: dict[str, Number] = field(default_factory=dict)
    """Proportion of sequences from each source; empty: all sources, in proportion to their size."""
    aligned: tuple[str, ...] = ()
    """Sources of short documents: their sequences begin where a document begins."""
    chat_share: Number = 0.0
    """Proportion of the question-and-answer documents that are rendered with the chat template."""
    validation: str | None = None
    """Validation data: a .jsonl file, or a corpus of which `heldout/` is used. Unset: `corpus/heldout` if present."""
    separate_documents: bool = False
    """No state and no attention from one document to the next in a sequence, and no loss for the first token of a
    document. Costs padding: documents of a batch are padded to its longest."""
    held_out: Number = 0.0
    """Proportion of each source's documents that is not trained on but used for validation if the corpus has no
    `heldout/` and `validation` is unset."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, or Muon (Jordan et al., 2024) for the matrices of the sublayers and AdamW for the rest."""

    __pydantic_config__ = _CHECKS

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Number = 1e-3
    adamw_learning_rate: Number | None = None
    """With muon: learning rate of the weights that AdamW updates. Unset: `learning_rate`."""
    warmup_steps: int = 100
    schedule: Literal["cosine", "stable"] = "cosine"
    """cosine: down to 0 over all steps. stable: constant, then linearly to 0 over the last `decay_steps`, so that
    `steps` may be changed until the decay begins (Hagele et al., 2024)."""
    decay_steps: int = 0
    weight_decay: Number = 0.1
    betas: tuple[Number, Number] = (0.9, 0.95)
    clip_norm: Number = 1.0


@dataclass(frozen=True)
class DraftSettings:
    """How the multi-token-prediction layer is trained."""

    __pydantic_config__ = _CHECKS

    depth_weights: tuple[Number, ...] = (0.3,)
    """Weights of the losses of successive drafts; their number is the depth to which the layer is unrolled."""
    targets: Literal["data", "model"] = "data"
    """data: the tokens of the text. model: the model's own distribution, which determines the acceptance of drafts."""
    detach: bool = False
    """Stop the gradient of the drafts' loss at the model's own weights."""
    every: int = 1
    """Unroll the layer over every n-th sequence of a batch only."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    __pydantic_config__ = _CHECKS

    model: dict[str, Any] = field(default_factory=dict)
    """The contents of config.json."""
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    steps: int = 1000
    batch_size: int = 8
    sequence_length: int = 512
    accumulate: int = 1
    """Number of equal parts of a batch whose gradients are computed one after the other and averaged: each part needs
    only its share of the memory for activations."""
    rematerialize: bool = False
    """Keep only the inputs of each sublayer for the gradient, and compute the rest again."""
    shard_weights: bool = False
    """Divide weights and their moments over the devices; each device then collects weights when it needs them."""
    balance_experts: Number = 0.0
    """Coefficient of the auxiliary loss that spreads tokens evenly over experts; 0: none."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the products; weights and their moments are always float32."""
    seed: int = 0
    log_every: int = 10
    save_every: int = 100
    """Steps between checkpoints."""
    validate_every: int = 100
    """Steps between computations of the validation loss, if there is validation data."""
    validation_sequences: int = 128
    """Maximum number of sequences in the validation loss, spread evenly over the validation data."""

    def __post_init__(self) -> None:
        for names, is_right, expected in _RULES:
            for name in names:
                if not is_right(value := attrgetter(name)(self)):
                    raise ModelConfigError(f"{name} is {value}: {expected} expected")
        if self.batch_size % self.accumulate:
            raise ModelConfigError(f"accumulate is {self.accumulate}: it must divide batch_size, {self.batch_size}")
        part = self.batch_size // self.accumulate
        if part % self.drafts.every:
            raise ModelConfigError(
                f"drafts.every is {self.drafts.every}: it must divide batch_size / accumulate, {part}"
            )


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("accumulate", "steps", "batch_size", "sequence_length", "log_every", "save_every", "validate_every"),
     lambda value: value >= 1, "at least 1 is"),
    (("validation_sequences", "drafts.every"), lambda value: value >= 1, "at least 1 is"),
    (("balance_experts", "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.weight_decay"),
     lambda value: value >= 0, "at least 0 is"),
    (("optimizer.learning_rate", "optimizer.adamw_learning_rate", "optimizer.clip_norm"),
     lambda value: value is None or value > 0, "a number above 0 is"),
    (("seed",), lambda value: 0 <= value < 2**63, "a number from 0 to below 2^63 is"),
    (("optimizer.betas",), lambda value: all(0 <= one < 1 for one in value), "numbers from 0 to below 1 are"),
    (("drafts.depth_weights",), lambda value: min(value, default=0) >= 0, "at least 0 is"),
    (("data.chat_share",), lambda value: 0 <= value <= 1, "a share between 0 and 1 is"),
    (("data.held_out",), lambda value: 0 <= value < 1, "a share from 0 to below 1 is"),
    (("data.mixture",), lambda value: min(value.values(), default=1) > 0, "shares above 0 are"),
)  # fmt: skip
"""Names of settings, the values that they may have, and what messages say of them."""
_SETTINGS = pydantic.TypeAdapter(TrainConfig)


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads the settings of a run from a file.

    Args:
        path: a YAML file, or a TOML file if its name ends with .toml.
        overrides: values that take precedence over the file's, under dotted names ("optimizer.learning_rate").
    Raises:
        ModelConfigError: the file cannot be read, or has fields that are unknown or wrong.
    """
    if path.exists() and not path.is_file():
        raise ModelConfigError(f"{path}: cannot be read (not a regular file)")
    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ModelConfigError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{path}: a mapping of settings is expected")
    for name, value in (overrides or {}).items():
        *groups, last = name.split(".")
        inner = fields
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise ModelConfigError(f"{path}: {group} has no setting {last}")
        inner[last] = value
    try:
        return _SETTINGS.validate_json(json.dumps(fields, default=str))
    except pydantic.ValidationError as error:
        raise ModelConfigError(_described(error.errors()[0])) from error
    except (ValueError, TypeError) as error:  # a value within itself, or a key that is no text
        raise ModelConfigError(f"{path}: cannot be read ({error})") from error


def _described(error: Mapping[str, Any]) -> str:
    """Returns one line about what pydantic finds wrong."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "unexpected_keyword_argument":
        kind: Any = TrainConfig
        for group in error["loc"][:-1]:
            kind = typing.get_type_hints(kind)[group]
        return f"unknown setting {name}; known are {', '.join(field.name for field in dataclasses.fields(kind))}"
    if error["type"] == "value_error":  # of __post_init__
        return str(error["ctx"]["error"])
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"{name} is {error['input']!r}: {message}"
