"""The weights of an engine: their version and their replacement."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

import jax

from checkpoints.errors import CheckpointError
from checkpoints.tensors.replacement import NewWeights, given_tensors, new_parameters
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import StepPrograms
from serving.engine.request_error import RequestError
from serving.points.digest import array_digest, combined

FIRST_VERSION = "0"


@dataclass(frozen=True)
class WeightsChecksum:
    """Digests of all values of the weights, in the dtypes in which the engine holds them."""

    weights_version: str
    checksum: str
    """Of the model's configuration and all weights: `serving.points.digest.model_digest` of an equal model."""
    weights: dict[str, str]
    """Of each weight by dotted path, 128 bits in hexadecimal."""


class Weights:
    """A model's weights in its programs.

    Args:
        model: the model of the programs; its parameters and the programs' are replaced together.
        programs: the programs, compiled for weights of these shapes; new values need no compilation.
        quantization, quantization_exclude: the flags with which the loaded weights were quantized.
        digest: digest of the loaded files, if known.
        fixed: why the weights cannot be replaced; empty if they can.
    """

    def __init__(
        self,
        model: HybridModel,
        programs: StepPrograms,
        *,
        quantization: str | None = None,
        quantization_exclude: Collection[str] = (),
        digest: str = "",
        fixed: str = "",
    ) -> None:
        self._model, self._programs, self._fixed = model, programs, fixed
        self._quantization, self._exclude = quantization, quantization_exclude
        self.version = FIRST_VERSION
        """The name of the weights in outputs."""
        self.updates = 0
        """Number of times that the weights were replaced."""
        self.digest = digest
        """Digest of the weights: of all bytes of files for loaded weights, of all values for later ones."""
        self.lineage = 0
        """A number computed from the digest, for names of states; equal only for equal weights. 0: the engine's initial
        weights."""
        self.whole = True
        """Whether all weights are present and have the same version. If False, no step may run."""
        self.seconds = 0.0
        """Duration of the last replacement in seconds."""

    def replace(self, given: NewWeights, *, version: str, partial: bool = False) -> None:
        """Replaces the weights, one parameter at a time.

        Raises:
            RequestError: the weights do not fit the model, or cannot be replaced. The weights are unchanged.
        """
        begin = time.perf_counter()
        self._check_replaceable()
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
        # Until all weights are replaced, they are a mixture. Its states must not match those of any other engine.
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

    def checksum(self) -> WeightsChecksum:
        """Computes digests of the weights in memory.

        Raises:
            RequestError: the weights were dropped, or an update has failed.
        """
        if not self.whole:
            raise RequestError("the engine has no complete weights: call update_weights(...) first")
        held = self._programs.weights
        digests = {path: array_digest(value) for path, value in held.items()}
        whole = combined(repr(self._model.config), digests, held)
        found = jax.device_get(digests)
        by_path = {path: "".join(f"{int(word):08x}" for word in found[path]) for path in sorted(found)}
        return WeightsChecksum(self.version, whole, by_path)

    def drop(self) -> None:
        """Frees the memory of the weights. Steps can run again after `replace`.

        Raises:
            RequestError: the weights cannot be replaced. They are unchanged.
        """
        self._check_replaceable()
        self.whole = False
        held = parameters(self._model)
        for path, value in self._programs.weights.items():
            empty = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            self._programs.replace_weight(path, empty)
            held[path].set_value(empty)

    def _check_replaceable(self) -> None:
        if self._fixed:
            raise RequestError(f"weights cannot be replaced: {self._fixed}")


def _number(digest: str) -> int:
    """Returns a number of 60 bits that is not 0."""
    return 1 + int(digest[:15], 16)
