"""Controls an engine between steps, for trainers: pause it, release its memory, replace its weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, get_args

import jax

from checkpoints.errors import CheckpointError
from checkpoints.tensors.replacement import NewWeights, given_tensors, new_parameters
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import StepPrograms
from serving.core.errors import RequestError
from serving.engine.steps.loop import StepLoop
from serving.state_transfer.identity import array_digest, combined

FIRST_VERSION = "0"


@dataclass(frozen=True)
class WeightsChecksum:
    """Digests of all values of the weights, in the dtypes in which the engine holds them."""

    weights_version: str
    checksum: str
    """Of the configuration and all weights: `state_transfer.identity.model_digest` of an equal model."""
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
    return 1 + int(digest[:15], 16)


PauseMode = Literal["wait", "abort", "keep"]


class Control:
    """Holds and releases an engine. A held engine accepts requests but dispatches no step.

    An engine is held while it is paused, while it sleeps, and while its weights are incomplete.

    Args:
        loop: the step loop of the engine.
        drain: settles all dispatched steps.
        abort_all: ends all requests.
    """

    def __init__(
        self, loop: StepLoop, weights: Weights, *, drain: Callable[[], None], abort_all: Callable[[], None]
    ) -> None:
        self._loop, self.weights, self._drain, self._abort_all = loop, weights, drain, abort_all
        self.paused = False
        self._pausing = False
        self.sleep_level = 0
        """The level of `sleep`; 0 while the engine is awake."""

    @property
    def held(self) -> bool:
        """Whether no step may be dispatched."""
        return self.paused or self.sleep_level > 0 or not self.weights.whole

    @property
    def why_held(self) -> str | None:
        """The reason why the engine is held, in one line; None if it is not held."""
        if self.sleep_level:
            return "the engine sleeps: call wake_up() first"
        if not self.weights.whole:
            return "the engine has no weights: call update_weights(...) first"
        return "the engine is paused: call resume() first" if self.paused else None

    def pause(self, mode: PauseMode = "abort") -> None:
        """Holds the engine until `resume`.

        Args:
            mode: handling of current requests. `wait`: they run until they finish, then the engine is held; new
                requests wait. `abort`: they end now, with the tokens generated so far. `keep`: they continue after
                `resume`; if the weights were replaced, the engine computes their states again from their tokens.

        Raises:
            RequestError: the mode is unknown.
        """
        if mode not in get_args(PauseMode):
            raise RequestError(f"pause mode {mode!r} is not known; allowed are {', '.join(get_args(PauseMode))}")
        if mode == "wait":
            self._loop.scheduler.hold_new()
            self._pausing = True
            self.stepped()
            return
        if mode == "abort":
            self._abort_all()
        self.paused = True
        self._drain()

    def stepped(self) -> None:
        """Completes a pause if the last request has finished. The engine calls this after each step."""
        if self._pausing and not self._loop.scheduler.has_unheld:
            self.paused, self._pausing = True, False

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = self._pausing = False
        self._loop.scheduler.release_new()

    def update_weights(self, given: NewWeights, *, version: str | int | None = None, partial: bool = False) -> str:
        """Replaces the model's weights in place between two steps, without compiling.

        The engine drops states computed with the old weights, and computes running requests again from their tokens.
        Each output's `weights_versions` lists the weights that produced its tokens.

        Args:
            given: NumPy or JAX arrays, in any floating-point dtype, by their names in a Hugging Face checkpoint or in
                this library; pairs of name and array; or a directory with safetensors files.
            version: the name of the new weights in outputs; None = the next number.
            partial: replace only the given weights. Otherwise all of the model's weights are required.

        Returns:
            The version.

        Raises:
            RequestError: the weights do not fit the model, or the version is in use. The weights are unchanged.
        """
        self._check_alone("weights cannot be replaced")
        name = str(self.weights.updates + 1 if version is None else version)
        if name == self.weights.version:
            raise RequestError(f"weights version {name!r} is in use: two versions cannot have one name")
        before = self.weights.updates
        self._drain()
        try:
            self.weights.replace(given, version=name, partial=partial)
        finally:
            if self.weights.updates != before or not self.weights.whole:
                self._loop.scheduler.change_weights(self.weights.lineage)
        return name

    def weights_checksum(self) -> WeightsChecksum:
        """Computes digests of the weights in memory, to compare with the trainer's.

        Raises:
            RequestError: the weights are not complete, or the engine runs on several hosts.
        """
        if self._loop.followers is not None:
            raise RequestError("checksums of weights are not supported on several hosts")
        return self.weights.checksum()

    def sleep(self, level: int = 1) -> None:
        """Frees device memory until `wake_up`: the memory of states and pages, and on level 2 also of the weights.

        Running requests wait, and the engine later computes them again from their tokens. After level 2, no step runs
        before `update_weights`.

        Raises:
            RequestError: the level is not 1 or 2.
        """
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not known; allowed are 1 and 2")
        self._check_alone("the store cannot be freed")
        self._drain()
        if level == 2:
            self.weights.drop()
        if not self.sleep_level:
            self._loop.free_store()
        self.sleep_level = max(level, self.sleep_level)

    def wake_up(self) -> None:
        """Allocates the memory for states and pages again."""
        self._loop.take_store()
        self.sleep_level = 0

    def _check_alone(self, what: str) -> None:
        if self._loop.followers is not None:
            raise RequestError(f"{what} on several hosts: weight updates and sleep are not supported there")
        if any(source.shared_with_workers for source in self._loop.sources):
            raise RequestError(
                f"{what} on a prefill or decode worker: weight updates and sleep are not supported there"
            )
