"""Resolves the argument of `--model` to files; models by their name on a hub are downloaded once, by `huggingface_hub`.

Its cache, its variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`) and its progress bars are as usual.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError, listing, one_line
from checkpoints.json_file import open_regular, parse_overrides, read_json
from checkpoints.presets import PRESETS

ORBAX_MARKER = "mamba_jax.json"
"""A directory with this file was written by `save_orbax`."""
_BASE = re.compile(r"""(?m)^base_model:\s*(?:-\s*)?["']?([\w.-]+/[\w.-]+)""")
DEMO = "demo"
DEMO_DIRECTORY = Path(__file__).resolve().parent / "demo"


class ReferenceKind(Enum):
    """The kinds of references."""

    HUGGING_FACE = "Hugging Face directory"
    ORBAX = "Orbax directory"
    DEMO = "the demo model"
    PRESET = "a published size, configuration only"


@dataclass(frozen=True)
class Reference:
    """A resolved reference. A preset has no directory."""

    kind: ReferenceKind
    name: str
    directory: Path | None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields that replace those of config.json."""

    @property
    def files(self) -> Path:
        """The directory.

        Raises:
            CheckpointError: a preset has none.
        """
        if self.directory is None:
            raise CheckpointError(
                f"{self.name!r} is a published size: a configuration without weights and tokenizer"
                " (give a directory, or load it with dummy weights)"
            )
        return self.directory


def resolve(ref: str | Path, hf_overrides: Mapping[str, Any] | str | None = None) -> Reference:
    """Finds out what `ref` names: `demo`, a directory (Hugging Face or Orbax), or a preset.

    A directory that is itself called `demo`, or like a preset, is reached as `./demo`.

    Args:
        ref: the reference.
        hf_overrides: fields that replace those of config.json: see `checkpoints.config_json`.
    Raises:
        CheckpointError: it names nothing that can be loaded, or the overrides cannot be used.
    """
    name, overrides = str(ref), parse_overrides(hf_overrides or {})
    if name == DEMO:
        return Reference(ReferenceKind.DEMO, name, DEMO_DIRECTORY, overrides)
    if not isinstance(ref, Path) and name in PRESETS:
        return Reference(ReferenceKind.PRESET, name, None, overrides)
    path = Path(ref).expanduser()
    if path.is_dir():
        kind = _directory_kind(path)
        if kind is ReferenceKind.ORBAX and overrides:
            raise CheckpointError(
                f"{name}: hf_overrides apply to config.json, which an Orbax directory does not use; "
                "apply them to the Hugging Face directory that it was converted from"
            )
        return Reference(kind, name, path, overrides)
    if path.suffix == ".gguf" and path.is_file():
        raise CheckpointError(f"{name}: GGUF files are not supported; {original_of(path.parent)}")
    if path.exists():
        raise CheckpointError(f"{name}: is a file; give the directory that holds config.json and the weights")
    expected = f"a Hugging Face or Orbax directory, {DEMO!r}, or a published size"
    presets = listing(PRESETS, 3)
    raise CheckpointError(f"{name}: no such model; expected {expected} ({presets}); nothing is downloaded here")


def original_of(directory: Path) -> str:
    """Returns what to give in place of a directory in another program's form: its card may name the original."""
    card = b""
    with contextlib.suppress(CheckpointError, OSError), open_regular(directory / "README.md") as file:
        card = file.read(1 << 14)
    named = _BASE.search(card.decode(errors="replace"))
    return "give the Hugging Face directory that it was made from" + (f", {named[1][:200]}" if named else "")


def _directory_kind(path: Path) -> ReferenceKind:
    if (path / ORBAX_MARKER).is_file():
        return ReferenceKind.ORBAX
    if (path / "config.json").is_file():
        return ReferenceKind.HUGGING_FACE
    if (path / "adapter_config.json").is_file():
        base = str(read_json(path / "adapter_config.json").get("base_model_name_or_path"))
        raise CheckpointError(
            f"{path}: is an adapter of {one_line(base, 200)}; give that model, and load the adapter by enable_lora"
        )
    if any(path.glob("*.gguf")):
        raise CheckpointError(f"{path}: GGUF files are not supported; {original_of(path)}")
    raise CheckpointError(f"{path}: neither a Hugging Face (no config.json) nor an Orbax directory (no {ORBAX_MARKER})")


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "merges.txt", "tiktoken.model", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_LEFT_OUT = ("*/*.json", "*/*.safetensors", "consolidated*")
"""What lies in folders, or is consolidated, is the same in other forms; except for further chat templates."""


def is_hub_name(ref: str) -> bool:
    """Returns whether a reference can only be a name on a hub: there is nothing of that name here."""
    return bool(_NAME.fullmatch(ref)) and not Path(ref).exists() and ref not in PRESETS


def local(ref: str, *, revision: str | None = None, download_dir: str | None = None, weights: bool = True) -> str:
    """Returns a reference that `resolve` takes: the same one, or the folder to which a hub's model has been downloaded.

    What is there already is not fetched again; offline, what is there is taken.

    Args:
        ref: anything that `resolve` takes, or a hub's name.
        revision: a branch, a tag or a commit of the hub's; None for its main branch.
        download_dir: the cache; None for the usual one.
        weights: False fetches the small files only.

    Raises:
        CheckpointError: the hub cannot be reached and has not been before, or does not have it, or does not give it.
    """
    if not is_hub_name(ref):
        return ref
    from huggingface_hub import constants, errors, snapshot_download  # only those who need it wait for it

    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
    reasons = {
        errors.GatedRepoError: "the hub asks for consent first: accept on its page, and set HF_TOKEN",
        errors.RepositoryNotFoundError: "no such directory, and no such model on the hub (or HF_TOKEN is needed)",
        errors.RevisionNotFoundError: f"the hub has no revision {revision!r} of it",
        errors.LocalEntryNotFoundError: f"no such directory, not in the cache, and {offline}",
    }
    try:
        return snapshot_download(
            ref,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*_WITHOUT_WEIGHTS, *(_WEIGHTS if weights else ())],
            ignore_patterns=list(_LEFT_OUT),
        )
    except (OSError, ValueError, errors.RevisionResolutionError) as error:
        known = (reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise CheckpointError(f"{ref}: {next(known, f'cannot be downloaded: {one_line(error)}')}") from None
