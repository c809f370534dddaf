"""Controls an engine between steps, for trainers: pause it, release its memory, replace its weights."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from checkpoints.tensors.replacement import NewWeights
from serving.engine.request_error import RequestError
from serving.engine.steps.loop import StepLoop
from serving.engine.weights import Weights, WeightsChecksum

PauseMode = Literal["wait", "abort", "keep"]


class ControlledEngine(Protocol):
    """The part of `Engine` that `Control` uses."""

    loop: StepLoop

    def drain(self) -> None: ...

    def abort_all(self) -> None: ...


class Control:
    """Holds and releases an engine. A held engine accepts requests but dispatches no step.

    An engine is held while it is paused, while it sleeps, and while its weights are incomplete.
    """

    def __init__(self, engine: ControlledEngine, weights: Weights) -> None:
        self._engine, self.weights = engine, weights
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
            self._engine.loop.scheduler.hold_new()
            self._pausing = True
            self.stepped()
            return
        if mode == "abort":
            self._engine.abort_all()
        self.paused = True
        self._engine.drain()

    def stepped(self) -> None:
        """Completes a pause if the last request has finished. The engine calls this after each step."""
        if self._pausing and not self._engine.loop.scheduler.has_unheld:
            self.paused, self._pausing = True, False

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = self._pausing = False
        self._engine.loop.scheduler.release_new()

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
        self._engine.drain()
        try:
            self.weights.replace(given, version=name, partial=partial)
        finally:
            if self.weights.updates != before or not self.weights.whole:
                self._engine.loop.scheduler.change_weights(self.weights.lineage)
        return name

    def weights_checksum(self) -> WeightsChecksum:
        """Computes digests of the weights in memory, to compare with the trainer's.

        Raises:
            RequestError: the weights are not complete, or the engine runs on several hosts.
        """
        if self._engine.loop.followers is not None:
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
        self._engine.drain()
        if level == 2:
            self.weights.drop()
        if not self.sleep_level:
            self._engine.loop.free_store()
        self.sleep_level = max(level, self.sleep_level)

    def wake_up(self) -> None:
        """Allocates the memory for states and pages again."""
        self._engine.loop.take_store()
        self.sleep_level = 0

    def _check_alone(self, what: str) -> None:
        if self._engine.loop.followers is not None:
            raise RequestError(f"{what} on several hosts: weight updates and sleep are not supported there")
        if any(source.shared_with_workers for source in self._engine.loop.sources):
            raise RequestError(
                f"{what} on a prefill or decode worker: weight updates and sleep are not supported there"
            )
