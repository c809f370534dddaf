"""The weights of an engine: their version, and how they are replaced."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax

from checkpoints.errors import CheckpointError
from checkpoints.replacement import NewWeights, given_tensors, new_parameters
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import StepPrograms
from serving.engine.request_error import RequestError
from serving.points.digest import array_digest, combined

FIRST_VERSION = "0"


class Weights:
    """A model's weights in its programs.

    Args:
        model: the model of the programs; its parameters are replaced together with theirs.
        programs: compiled for weights of these shapes; new values need no compilation.
        quantization, quantization_exclude: how the weights were quantized when they were loaded.
        digest: of the loaded files, if known.
    """

    def __init__(
        self,
        model: HybridModel,
        programs: StepPrograms,
        *,
        quantization: str | None = None,
        quantization_exclude: Collection[str] = (),
        digest: str = "",
    ) -> None:
        self._model, self._programs = model, programs
        self._quantization, self._exclude = quantization, quantization_exclude
        self.version = FIRST_VERSION
        """The name of the weights in outputs."""
        self.updates = 0
        """How often the weights were replaced."""
        self.digest = digest
        """Identifies the weights: those loaded from files by all their bytes, later ones by all their values."""
        self.lineage = 0
        """A number computed from the digest, for names of states: equal only for equal weights. 0: the weights that the
        engine started with."""
        self.whole = True
        """Whether all weights are present and of one version. If not, no step may run."""
        self.seconds = 0.0
        """Duration of the last replacement."""

    def next_version(self, wanted: str | int | None) -> str:
        """The name of the next version: `wanted`, or the next number.

        Raises:
            RequestError: the present weights have this name.
        """
        version = str(self.updates + 1 if wanted is None else wanted)
        if version == self.version:
            raise RequestError(f"weights version {version!r} is in use: two versions cannot have one name")
        return version

    def replace(self, given: NewWeights, *, version: str, partial: bool = False) -> None:
        """Replace the weights, one parameter at a time.

        Raises:
            RequestError: the weights do not fit the model. Nothing has changed.
        """
        begin = time.perf_counter()
        try:
            if partial and not self.whole:
                raise CheckpointError("partial=True needs a complete set of weights: send a full update first")
            stream = new_parameters(
                self._model.config,
                self._programs.weights,
                given_tensors(given),
                quantization=self._quantization,
                quantization_exclude=self._exclude,
                partial=partial,
            )
        except CheckpointError as error:
            raise RequestError(str(error)) from None
        held = parameters(self._model)
        before = f"{self.digest} {self.lineage}" if partial else repr(self._model.config)
        # A mixture until all are replaced: its states must match those of no other engine.
        self.whole, self.lineage = False, _number(secrets.token_hex(16))
        digests: dict[str, jax.Array] = {}
        for path, value in stream:
            self._programs.replace_weight(path, value)
            held[path].set_value(value)
            digests[path] = array_digest(value)
        self.digest = combined(before, digests, self._programs.weights)
        self.lineage = _number(self.digest)
        self.version, self.whole = version, True
        self.updates += 1
        self.seconds = time.perf_counter() - begin

    def drop(self) -> None:
        """Frees the memory of the weights. Steps can run again after `replace`."""
        self.whole = False
        held = parameters(self._model)
        for path, value in self._programs.weights.items():
            empty = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            self._programs.replace_weight(path, empty)
            held[path].set_value(empty)


class Update(NamedTuple):
    """An update of the weights of all replicas."""

    version: str
    """The requested version, or the next number."""
    lacking: list[bool]
    """For each replica, whether to update it: False if it has this version, as after an update that failed on others.
    All are True if all have it: they then refuse the version."""

    @classmethod
    def of(cls, replicas: Sequence[Weights], wanted: str | int | None) -> Update:
        """The version is counted from the replica with the most updates: one that failed an update has fewer."""
        version = str(1 + max(weights.updates for weights in replicas)) if wanted is None else str(wanted)
        lacking = [weights.version != version or not weights.whole for weights in replicas]
        return cls(version, lacking if any(lacking) else [True] * len(lacking))


def _number(digest: str) -> int:
    """A number of 60 bits that is not 0."""
    return 1 + int(digest[:15], 16)
