"""The weights that an engine runs on: which version they are, and how others take their place."""

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
        model: what the programs were made of; its parameters are kept the same as theirs.
        programs: compiled for weights of these shapes: new values need no others.
        quantization, quantization_exclude: what the weights were rounded to when they were loaded.
        digest: of the weights as they were loaded, where that is known.
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
        """What the weights are called in outputs."""
        self.updates = 0
        """How often they have been replaced."""
        self.digest = digest
        """Identifies the weights: those loaded from files by all their bytes, later ones by all their values."""
        self.lineage = 0
        """A number made of the digest, for names of states: equal only where the weights are. 0: those that the engine
        began with."""
        self.whole = True
        """Whether all of them are there, and of one version. If not, no step may run."""
        self.seconds = 0.0
        """How long the last replacement took."""

    def next_version(self, wanted: str | int | None) -> str:
        """The name of the version to come: what was asked for, or the next number.

        Raises:
            RequestError: it is what the present weights are called.
        """
        version = str(self.updates + 1 if wanted is None else wanted)
        if version == self.version:
            raise RequestError(f"weights version {version!r} is in use: two versions cannot have one name")
        return version

    def replace(self, given: NewWeights, *, version: str, partial: bool = False) -> None:
        """Replace the weights, one parameter at a time.

        Raises:
            RequestError: they do not fit. Nothing has changed.
        """
        begin = time.perf_counter()
        try:
            if partial and not self.whole:
                raise CheckpointError("the weights are not there as a whole: partial=True needs what it leaves alone")
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
        # Until all are replaced, they are a mixture that no other engine has.
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
        """Gives their memory back. Steps can run again after `replace`."""
        self.whole = False
        held = parameters(self._model)
        for path, value in self._programs.weights.items():
            empty = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            self._programs.replace_weight(path, empty)
            held[path].set_value(empty)


class Update(NamedTuple):
    """The next weights of all replicas."""

    version: str
    """What they are called: what was asked for, or the next number."""
    lacking: list[bool]
    """Which replicas are to take them: those without this version, as after a try that failed on some. All, where all
    have it: they say that it is in use."""

    @classmethod
    def of(cls, replicas: Sequence[Weights], wanted: str | int | None) -> Update:
        """A replica that failed to take the last ones has counted less, and follows the others."""
        version = str(1 + max(weights.updates for weights in replicas)) if wanted is None else str(wanted)
        lacking = [weights.version != version or not weights.whole for weights in replicas]
        return cls(version, lacking if any(lacking) else [True] * len(lacking))


def _number(digest: str) -> int:
    """Of 60 bits, and not 0."""
    return 1 + int(digest[:15], 16)
