"""All tensors of a Hugging Face directory, from all its files, and writing them to files of a bounded size."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, listing
from checkpoints.json_file import open_regular, read_json, reading
from checkpoints.resolve import original_of
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.safetensors_file import SafetensorsFile, TensorEntry

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MOST_INDEX = 256 << 20
"""Maximum bytes of the index: it has a line for each of perhaps a million tensors."""
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class TensorSet:
    """The tensors of a directory by name: from its index, or from its safetensors files.

    Args:
        directory: of the files.
        hasher: hashes each tensor when it is released.
        prefixes: removed from the start of names, such as those of a text model in a multimodal checkpoint.

    Raises (from the constructor):
        CheckpointError: no safetensors file, a missing shard, a truncated or corrupt file.
    """

    def __init__(self, directory: Path, hasher: FileHasher | None = None, *, prefixes: Sequence[str] = ()) -> None:
        self.directory, self._hasher = directory, hasher
        self._stored: dict[str, tuple[SafetensorsFile, str]] = {}
        for name in _file_names(directory):
            file = SafetensorsFile(directory / name)
            if file.metadata.get("format") == "mlx":
                # Norms that MLX stores with 1 added would be read without an error.
                raise CheckpointError(f"{file.path}: weights in MLX's form are not supported; {original_of(directory)}")
            for stored in file.entries:
                prefix = next((prefix for prefix in prefixes if stored.startswith(prefix)), "")
                self._stored[stored.removeprefix(prefix)] = file, stored
            if hasher is not None:
                ranges = {_label(name, entry): (entry.start, entry.end) for name, entry in file.entries.items()}
                hasher.add(file.path, ranges, file.status)
        self._names = set(self._stored)

    @property
    def names(self) -> set[str]:
        """The names of all tensors: always the same set, as readers ask several times for each of them."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the stored shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Returns the stored dtype in the spelling of the format, for example `BF16`."""
        return self._entry(name).dtype

    def location(self, name: str) -> tuple[str, str]:
        """Returns the name of a tensor in its file, with its prefix, and the name of that file."""
        file, stored = self._stored[name]
        return stored, file.path.name

    def view(self, name: str) -> np.ndarray:
        """Returns the tensor as a read-only view of the mapped file."""
        file, stored = self._stored[name]
        return file.view(stored)

    def release(self, name: str) -> None:
        """Releases the memory of a tensor that has been copied."""
        file, stored = self._stored[name]
        file.release(stored)
        if self._hasher is not None:
            self._hasher.start(file.path, _label(stored, file.entries[stored]))

    def read_ahead(self) -> None:
        """Reads all files once, so that later reads find their bytes in memory, as far as they fit.

        Raises:
            CheckpointError: a file cannot be read.
        """
        for path in {file.path for file, _ in self._stored.values()}:
            with reading(path), open_regular(path) as content:
                while content.read(1 << 24):
                    pass

    def _entry(self, name: str) -> TensorEntry:
        file, stored = self._stored[name]
        return file.entries[stored]


def _label(name: str, entry: TensorEntry) -> str:
    return f"{name} {entry.dtype} {list(entry.shape)}"


def _file_names(directory: Path) -> list[str]:
    with reading(directory):
        present = {path.name for path in directory.glob("*.safetensors")}
    if (directory / INDEX_FILE).is_file():
        index = directory / INDEX_FILE
        weight_map = read_json(index, MOST_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: has no weight_map of tensor names to file names")
        files = set(weight_map.values())
        if any(Path(file).name != file for file in files):
            raise CheckpointError(f"{index}: names files outside its directory")
    elif SINGLE_FILE in present:
        files = {SINGLE_FILE}
    else:
        files = {sibling for name in present for sibling in _siblings(name)}
    if not files & present and SINGLE_FILE in present:  # the index is left from the model that this one was made from
        return [SINGLE_FILE]
    missing = sorted(files - present)
    if missing:
        raise CheckpointError(f"{directory}: missing {len(missing)} of {len(files)} shards: {listing(missing)}")
    if not files:
        torch_files = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        hint = (
            "; only safetensors weights can be read, convert the .bin files first: transformers' from_pretrained, then "
            "save_pretrained"
            if torch_files
            else ""
        )
        raise CheckpointError(f"{directory}: has no *.safetensors file{hint}")
    return sorted(files)


def _siblings(name: str) -> list[str]:
    """Returns the names of all shards that a name such as `model-00001-of-00003.safetensors` implies."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match.groups()
    return [f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]


FILE_BYTES = 2 << 30
"""Of tensors in one file, which are on the host together; a larger tensor has a file of its own."""


class TensorFiles:
    """Writes numbered files and their index; tensors that fit into one file are `model.safetensors`, without an index.

    Call `close` at the end.

    Args:
        directory: exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, np.ndarray] = {}
        self._weight_map: dict[str, str] = {}
        self._number = self._total = 0

    def add(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor, at the latest when the next file is full."""
        if self._held and sum(each.nbytes for each in self._held.values()) + value.nbytes > FILE_BYTES:
            self._write(f"model-{self._number + 1:05d}.safetensors")
        self._held[name] = np.ascontiguousarray(value)
        self._total += value.nbytes

    def close(self) -> None:
        """Writes the remaining tensors, and the index."""
        if not self._number:
            self._write(SINGLE_FILE)
            return
        self._write(f"model-{self._number + 1:05d}.safetensors")
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")

    def _write(self, file: str) -> None:
        self._number += 1
        save_file(self._held, self._directory / file, {"format": "pt"})
        (self._directory / file).chmod(0o644)
        self._weight_map |= dict.fromkeys(self._held, file)
        self._held = {}
