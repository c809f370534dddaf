"""The settings of a training run, read from a YAML or TOML file."""

import dataclasses
import json
import reprlib
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass

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
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Delay = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, config=_CHECKS)
class DataSettings:
    """The documents of the training data, and their proportions."""

    corpus: str = "corpus"
    """A directory with `train/SOURCE.jsonl`; relative to the working directory."""
    mixture: dict[str, Positive] = field(default_factory=dict)
    """Proportion of sequences from each source; empty: all sources, in proportion to their size."""
    aligned: tuple[str, ...] = ()
    """Sources of short documents: their sequences begin where a document begins."""
    chat_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Proportion of the question-and-answer documents that are rendered with the chat template."""
    validation: str | None = None
    """Validation data: a .jsonl file, or a corpus of which `heldout/` is used. Unset: `corpus/heldout` if present."""
    separate_documents: bool = False
    """No state and no attention from one document to the next in a sequence, and no loss for the first token of a
    document. Costs padding: documents of a batch are padded to its longest."""
    held_out: Share = 0.0
    """Proportion of each source's documents that is not trained on but used for validation if the corpus has no
    `heldout/` and `validation` is unset."""


@dataclass(frozen=True, config=_CHECKS)
class OptimizerSettings:
    """AdamW, or Muon (Jordan et al., 2024) for the matrices of the sublayers and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    adamw_learning_rate: Positive | None = None
    """With muon: learning rate of the weights that AdamW updates. Unset: `learning_rate`."""
    warmup_steps: Delay = 100
    schedule: Literal["cosine", "stable"] = "cosine"
    """cosine: down to 0 over all steps. stable: constant, then linearly to 0 over the last `decay_steps`, so that
    `steps` may be changed until the decay begins (Hagele et al., 2024)."""
    decay_steps: Delay = 0
    weight_decay: NotNegative = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: Positive = 1.0


@dataclass(frozen=True, config=_CHECKS)
class DraftSettings:
    """How the multi-token-prediction layer is trained."""

    depth_weights: tuple[NotNegative, ...] = (0.3,)
    """Weights of the losses of successive drafts; their number is the depth to which the layer is unrolled."""
    targets: Literal["data", "model"] = "data"
    """data: the tokens of the text. model: the model's own distribution, which determines the acceptance of drafts."""
    detach: bool = False
    """Stop the gradient of the drafts' loss at the model's own weights."""
    every: Count = 1
    """Unroll the layer over every n-th sequence of a batch only."""


@dataclass(frozen=True, config=_CHECKS)
class TrainConfig:
    """A training run."""

    model: dict[str, Any] = field(default_factory=dict)
    """The contents of config.json."""
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    steps: Count = 1000
    batch_size: Count = 8
    sequence_length: Count = 512
    accumulate: Count = 1
    """Number of equal parts of a batch whose gradients are computed one after the other and averaged: each part needs
    only its share of the memory for activations."""
    rematerialize: bool = False
    """Keep only the inputs of each sublayer for the gradient, and compute the rest again."""
    shard_weights: bool = False
    """Divide weights and their moments over the devices; each device then collects weights when it needs them."""
    balance_experts: NotNegative = 0.0
    """Coefficient of the auxiliary loss that spreads tokens evenly over experts; 0: none."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the products; weights and their moments are always float32."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: Count = 10
    save_every: Count = 100
    """Steps between checkpoints."""
    validate_every: Count = 100
    """Steps between computations of the validation loss, if there is validation data."""
    validation_sequences: Count = 128
    """Maximum number of sequences in the validation loss, spread evenly over the validation data."""

    def __post_init__(self) -> None:
        if self.batch_size % self.accumulate:
            raise ModelConfigError(f"accumulate is {self.accumulate}: it must divide batch_size, {self.batch_size}")
        part = self.batch_size // self.accumulate
        if part % self.drafts.every:
            raise ModelConfigError(
                f"drafts.every is {self.drafts.every}: it must divide batch_size / accumulate, {part}"
            )


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
        return train_config(fields)
    except ModelConfigError:
        raise
    except (ValueError, TypeError) as error:  # a value within itself, or a key that is no text
        raise ModelConfigError(f"{path}: cannot be read ({error})") from error


def train_config(fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings of a run from values by name; those of groups are mappings.

    Raises:
        ModelConfigError: fields are unknown or wrong.
    """
    try:
        return _SETTINGS.validate_json(json.dumps(fields, default=str))
    except pydantic.ValidationError as error:
        raise ModelConfigError(_described(error.errors()[0])) from error


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
    return f"{name} is {reprlib.repr(error['input'])}: {message}"
