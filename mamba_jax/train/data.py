"""Sequences of tokens for each step, drawn from several sources in fixed proportions.

The seed and the step's number alone determine a step's sequences, so a run that continues from a checkpoint gets the
same sequences as an uninterrupted run.

Where documents are separate, the first token of each is marked in the sequences: it is stored as its complement
`~token`, which is negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from mamba_jax.config import ModelConfigError

_BLOCK = 120  # number of sequences within which the shares of the sources are met


@dataclass(frozen=True)
class TokenStream:
    """The documents of one source, one after the other."""

    tokens: Int32[np.ndarray, " tokens"]
    starts: Int32[np.ndarray, " documents"]
    """Where each document begins."""
    aligned: bool = False
    """Sequences begin with a document. Otherwise anywhere."""

    @classmethod
    def of(cls, documents: Iterable[Sequence[int] | np.ndarray], *, aligned: bool = False) -> TokenStream:
        """Returns the stream of these documents."""
        arrays = [np.asarray(document, np.int32) for document in documents]
        lengths = np.cumsum([0, *map(len, arrays)])
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        return cls(tokens, lengths[:-1].astype(np.int32), aligned)

    def sequence(self, start: int, length: int, *, separate: bool) -> Int32[np.ndarray, " length"]:
        """Returns the tokens from `start` on; with `separate`, the first token of each document is marked."""
        tokens = self.tokens[start : start + length]
        if separate:
            first, after = np.searchsorted(self.starts, (start, start + length))
            tokens = tokens.copy()
            places = self.starts[first:after] - start
            tokens[places] = ~tokens[places]
        return tokens

    def windows(self, length: int, offset: int) -> Int32[np.ndarray, " windows"]:
        """Where the sequences of one pass over the stream begin; `offset` shifts those that may begin anywhere."""
        last = len(self.tokens) - length
        if not self.aligned:
            return np.arange(offset % length, last + 1, length, dtype=np.int32)
        after = np.searchsorted(self.starts, np.arange(0, last + 1, length))
        starts = self.starts[np.unique(np.minimum(after, len(self.starts) - 1))]
        return starts[starts <= last]


def hold_out(streams: Mapping[str, TokenStream], share: float) -> tuple[dict[str, TokenStream], dict[str, TokenStream]]:
    """Divides the documents of each source into training and validation data.

    Args:
        streams: tokens by source.
        share: of the documents, above 0 and below 1; those for validation are spread evenly.
    Returns:
        The streams for training, and those for validation.
    """
    training: dict[str, TokenStream] = {}
    validation: dict[str, TokenStream] = {}
    for name, stream in streams.items():
        documents = np.split(stream.tokens, stream.starts[1:])
        held = np.diff(np.floor(np.arange(len(documents) + 1) * share)) > 0
        for target, wanted in ((training, False), (validation, True)):
            chosen = [document for document, is_held in zip(documents, held, strict=True) if is_held == wanted]
            target[name] = TokenStream.of(chosen, aligned=stream.aligned)
    return training, validation


def save_streams(path: Path, streams: Mapping[str, TokenStream]) -> None:
    """Writes streams to one .npz file."""
    arrays: dict[str, np.ndarray] = {}
    for name, stream in streams.items():
        arrays |= {f"{name}.tokens": stream.tokens, f"{name}.starts": stream.starts}
        arrays[f"{name}.aligned"] = np.asarray(stream.aligned)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def read_streams(path: Path) -> dict[str, TokenStream]:
    """Reads streams that `save_streams` wrote."""
    with np.load(path) as arrays:
        names = sorted(name.removesuffix(".tokens") for name in arrays.files if name.endswith(".tokens"))
        return {
            n: TokenStream(arrays[f"{n}.tokens"], arrays[f"{n}.starts"], bool(arrays[f"{n}.aligned"])) for n in names
        }


@dataclass(frozen=True)
class DocumentBounds:
    """Bounds of the documents in some sequences; a training step is compiled for them."""

    documents: int
    longest: int
    """Tokens."""

    @classmethod
    def of(cls, parts: Int32[np.ndarray, "parts batch length"]) -> DocumentBounds | None:
        """The bounds of each part, rounded up to powers of two so that few programs are compiled. None: no marks."""
        if not (parts < 0).any():
            return None
        starts = parts[..., :-1] < 0
        starts[..., 0] = True
        length = starts.shape[-1]
        first = np.flatnonzero(starts)
        longest = int(np.diff(np.append(first, starts.size)).max())
        documents = int(starts.sum(axis=(1, 2)).max())
        return cls(_power_of_two(documents), min(length, _power_of_two(longest)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class Batches:
    """The sequences of each step.

    Args:
        streams: tokens by source.
        shares: of the sequences, by source; they need not sum to 1.
        batch_size: sequences in a step.
        length: tokens in a sequence.
        seed: of the order.
        separate: mark the first token of each document.
    Raises:
        ModelConfigError: no source, a share without a source, or a source shorter than a sequence.
    """

    def __init__(
        self,
        streams: Mapping[str, TokenStream],
        shares: Mapping[str, float],
        *,
        batch_size: int,
        length: int,
        seed: int,
        separate: bool = False,
    ) -> None:
        if not shares:
            raise ModelConfigError("the data has no source: give at least one document")
        if unknown := sorted(set(shares) - set(streams)):
            raise ModelConfigError(f"data.mixture has {unknown[0]!r}; the corpus has {', '.join(streams)}")
        for name in shares:
            if not len(streams[name].windows(length, 0)):
                raise ModelConfigError(f"source {name!r} has {len(streams[name].tokens)} tokens: fewer than a sequence")
        self._names, self._streams = sorted(shares), streams
        self._batch_size, self._length, self._seed, self._separate = batch_size, length, seed, separate
        total = sum(shares.values())
        bounds = np.round(np.cumsum([shares[name] / total for name in self._names]) * _BLOCK).astype(int)
        self._pattern = np.searchsorted(bounds, np.arange(_BLOCK), side="right")
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def __getitem__(self, step: int) -> Int32[np.ndarray, "batch length"]:
        """Returns the sequences of step number `step`, counted from 0."""
        rows = range(step * self._batch_size, (step + 1) * self._batch_size)
        return np.stack([self._row(number) for number in rows])

    def _row(self, number: int) -> np.ndarray:
        block, place = divmod(number, _BLOCK)
        kinds = np.random.default_rng([self._seed, block]).permutation(self._pattern)
        kind, per_block = kinds[place], int((self._pattern == kinds[place]).sum())
        name = self._names[kind]
        stream, turn = self._streams[name], block * per_block + int((kinds[:place] == kind).sum())
        # Passes differ a little in size where they begin at different offsets; the smallest counts.
        size = min(len(stream.windows(self._length, offset)) for offset in (0, self._length - 1))
        epoch, index = divmod(turn, size)
        start = self._order(name, epoch)[index]
        return stream.sequence(start, self._length, separate=self._separate)

    def _order(self, name: str, epoch: int) -> np.ndarray:
        """Where the sequences of a source's pass begin, shuffled."""
        if (name, epoch) not in self._orders:
            rng = np.random.default_rng([self._seed, self._names.index(name), epoch, 1])
            windows = self._streams[name].windows(self._length, int(rng.integers(self._length)))
            self._orders = {key: order for key, order in self._orders.items() if key[0] != name}
            self._orders[name, epoch] = rng.permutation(windows)
        return self._orders[name, epoch]
