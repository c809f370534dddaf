"""What a trainer does to an engine between steps: hold it, give its memory away for a while, and change its weights."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from checkpoints.replacement import NewWeights
from serving.engine.loop import StepLoop
from serving.engine.request_error import RequestError
from serving.engine.weights import Weights

PauseMode = Literal["wait", "abort", "keep"]


class Controlled(Protocol):
    """What is controlled: an `Engine`."""

    loop: StepLoop

    def drain(self) -> None: ...

    def abort_all(self) -> None: ...


class Control:
    """Holds an engine, and lets it go again. While it is held it takes requests, and no step is dispatched.

    An engine is held while it is paused, while it sleeps, and while its weights are not all there.
    """

    def __init__(self, engine: Controlled, weights: Weights) -> None:
        self._engine, self.weights = engine, weights
        self.paused = False
        self._pausing = False
        self.sleep_level = 0
        """0: awake."""

    @property
    def held(self) -> bool:
        """Whether no step may be dispatched."""
        return self.paused or self.sleep_level > 0 or not self.weights.whole

    @property
    def why_held(self) -> str | None:
        """One line for a user; None where the engine is not held."""
        if self.sleep_level:
            return "the engine sleeps: call wake_up() first"
        if not self.weights.whole:
            return "the engine has no weights: call update_weights(...) first"
        return "the engine is paused: call resume() first" if self.paused else None

    def pause(self, mode: PauseMode = "abort") -> None:
        """Hold the engine until `resume`.

        Args:
            mode: what becomes of the requests that there are. `wait`: they run to their ends, and then the engine is
                held; those that come meanwhile wait. `abort`: they end now, with what they have. `keep`: they stay as
                they are and go on later: under other weights from their tokens, if those are replaced.

        Raises:
            RequestError: no such mode.
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
        """A step is over: those that a pause waits for may have come to their ends."""
        if self._pausing and not self._engine.loop.scheduler.has_unheld:
            self.paused, self._pausing = True, False

    def resume(self) -> None:
        """End a pause."""
        self.paused = self._pausing = False
        self._engine.loop.scheduler.release_new()

    def update_weights(self, given: NewWeights, *, version: str | int | None = None, partial: bool = False) -> str:
        """Replace the model's weights between two steps, where they lie. Nothing is compiled.

        Nothing that the old weights have computed is used any more: requests that run go on from their tokens. Which
        tokens come from which weights stands in each output's `weights_versions`.

        Args:
            given: arrays of NumPy or JAX, in any floating-point dtype, by the names of a Hugging Face checkpoint or by
                ours; pairs of both; or a directory with safetensors files.
            version: what the new weights are called in outputs; the next number if None.
            partial: replace only what is given. Otherwise all of the model's weights are needed.

        Returns:
            The version.

        Raises:
            RequestError: weights that do not fit, or a version that is in use. Nothing has changed.
        """
        self._check_alone("weights cannot be replaced")
        name = self.weights.next_version(version)
        before = self.weights.updates
        self._engine.drain()
        try:
            self.weights.replace(given, version=name, partial=partial)
        finally:
            if self.weights.updates != before or not self.weights.whole:
                self._engine.loop.scheduler.change_weights(self.weights.lineage)
        return name

    def sleep(self, level: int = 1) -> None:
        """Give memory of the device back until `wake_up`: that of states and pages, and on level 2 that of the weights.

        Requests that run wait, and are computed again from their tokens. After level 2, `update_weights` must come
        before any step.

        Raises:
            RequestError: no such level.
        """
        if level not in (1, 2):
            raise RequestError(f"sleep level {level!r} is not known; allowed are 1 and 2")
        self._check_alone("the store cannot be freed")
        self._engine.drain()
        if not self.sleep_level:
            self._engine.loop.free_store()
        if level == 2:
            self.weights.drop()
        self.sleep_level = max(level, self.sleep_level)

    def wake_up(self) -> None:
        """Take the memory for states and pages again."""
        self._engine.loop.take_store()
        self.sleep_level = 0

    def _check_alone(self, what: str) -> None:
        if self._engine.loop.followers is not None:
            raise RequestError(f"{what} on several hosts: only steps are done by all of them")
        if self._engine.loop.connector is not None:
            raise RequestError(f"{what} on a worker of a split: others hold states of it")
