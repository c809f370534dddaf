"""What a mixer declares: the state that it keeps of a sequence, and how its arrays are divided over devices.

Store, sizes, sharding, transfer and plans fold over these declarations, so that none of them has to know a mixer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mamba_jax.config.errors import ModelConfigError


class Otherwise(enum.Enum):
    """What becomes of an axis whose units do not divide evenly over the devices."""

    REFUSE = "refuse"
    """An error."""
    KEEP_WHOLE = "keep whole"
    """Every device has all of it."""
    SHARE = "share"
    """Every device has all of it, and uses the one unit that it shares with others; devices are a multiple of units."""
    REPEAT = "repeat"
    """Each device has the one unit that it shares with others, so that all devices together have it several times."""


@dataclass(frozen=True)
class Division:
    """How an array is divided over devices: along one axis, in units that must stay whole."""

    axis: int
    """Of a parameter, or of what a slot or a token has of a state."""
    units: int
    """Heads, groups or channels along the axis."""
    what: str
    """What the units are, for the reader of an error."""
    parts: int = 1
    """The axis holds so many things side by side, each with all units. Devices lie outermost: one has its units of the
    first, then of the second."""
    otherwise: Otherwise | Division = Otherwise.REFUSE
    repeat: int = 1
    """How many devices have the same unit."""
    rank: int = 2
    """Axes of a weight matrix; its outputs and inputs are the last two. Asked where it is quantised."""

    def moved(self, axes: int) -> Division:
        """The same units so many axes further back."""
        otherwise = self.otherwise.moved(axes) if isinstance(self.otherwise, Division) else self.otherwise
        return replace(self, axis=self.axis + axes, otherwise=otherwise)

    def over(self, shards: int) -> Division | None:
        """The division over so many devices; None if every device has all of the array.

        Raises:
            ModelConfigError: the units do not divide, and nothing else is declared.
        """
        if self.units % shards == 0:
            return self
        if isinstance(self.otherwise, Division):
            return self.otherwise.over(shards)
        if self.otherwise is Otherwise.KEEP_WHOLE:
            return None
        if self.otherwise is Otherwise.REFUSE:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} does not divide this model's {self.units} {self.what}"
            )
        if shards % self.units:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} neither divides this model's {self.units} {self.what} "
                "nor is a multiple of them"
            )
        return None if self.otherwise is Otherwise.SHARE else replace(self, repeat=shards // self.units)


class Undivided(enum.Enum):
    """A parameter that every device has all of."""

    WHOLE = "whole"
    ADDED_ONCE = "added once"
    """It is added to a partial sum, which one device only may do."""


WHOLE, ADDED_ONCE = Undivided.WHOLE, Undivided.ADDED_ONCE
Placement = Division | Undivided
"""Of a parameter."""


class Role(enum.Enum):
    """What the numbers of a state are; their dtype follows from it."""

    ACCUMULATED = "accumulated"
    """A recurrent state, which every token adds to and rounds anew."""
    WINDOW = "window"
    """The last few inputs as they came."""
    ACTIVATION = "activation"
    """What the model computed of one token."""
    STEERING = "steering"
    """What steers a recurrence, or is added to its state: always float32."""


class Per(enum.Enum):
    """What there is one of the array for."""

    SLOT = "slot"
    TOKEN = "token"
    """Of a page."""
    TAIL = "tail"
    """A token of a tail: the inputs since a running row's anchor; see `mamba_jax.tails`."""


@dataclass(frozen=True)
class StateArray:
    """An array that a sublayer keeps of each sequence."""

    name: str
    """The same name is the same array in all sublayers of a model that have it."""
    shape: tuple[int, ...]
    """Of one slot, or of one token in a page or a tail."""
    role: Role
    division: Division | None
    """None: every device has all of it."""
    per: Per = Per.SLOT
    of: str = ""
    """Of a tail: the name of the array in slots that its tokens are inputs of."""
    last: int | None = None
    """Of a tail: how many tokens before a step count; None: all since the anchor."""
    replay_kernels: tuple[str, ...] = ()
    """Of what accumulates: platforms ("tpu", "gpu", "cpu") with a kernel for its replay, so that it may be chosen. On
    CPU that is a native operation, which an installation may lack."""

    def inputs(self) -> StateArray:
        """Of a window: the tail of what goes into it."""
        return StateArray(
            f"{self.name}_inputs",
            self.shape[1:],
            Role.WINDOW,
            self.division and self.division.moved(-1),
            Per.TAIL,
            of=self.name,
            last=self.shape[0],
        )

    @property
    def padded(self) -> bool:
        """Whether the last axis is padded to the device's lanes; see `mamba_jax.store_layout`."""
        steers_replay = self.per is Per.TAIL and self.role is Role.STEERING
        return self.per is Per.TOKEN or self.role is Role.ACCUMULATED or steers_replay

    def copied_by_slots(self, lanes: int) -> bool:
        """Whether a device with so many lanes copies a slot's numbers as they lie, which must be together for that.

        Windows are (see `kernels_pallas.windows`); `shape` is then what one device has of a slot.
        """
        return lanes > 1 and self.per is Per.SLOT and self.role is Role.WINDOW and self.shape[-1] % lanes == 0

    def size(self, lanes: int = 1) -> int:
        """Numbers in it, padding included."""
        *rest, last = self.shape
        if self.copied_by_slots(lanes):
            # A register has 8 rows of lanes; where there are fewer, they are padded to 2 or 4.
            rows = rest[-1]
            rest[-1] = 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8
        return math.prod(rest) * (-(-last // lanes) * lanes if self.padded else last)

    def dtype(self, dtype: Any, ssm_dtype: Any) -> Any:
        """`ssm_dtype` for what accumulates, float32 for what steers, `dtype` for all else."""
        if self.role is Role.STEERING:
            return "float32"
        return ssm_dtype if self.role is Role.ACCUMULATED else dtype

    def over(self, shards: int) -> StateArray:
        """The array as all of so many devices keep it together.

        Raises:
            ModelConfigError: it does not divide over them.
        """
        division = self.division and self.division.over(shards)
        return replace(self, shape=self._resized(division.repeat if division else 1, 1, division), division=division)

    def on_each(self, shards: int) -> StateArray:
        """The array as each of so many devices has it.

        Raises:
            ModelConfigError: it does not divide over them.
        """
        stored = self.over(shards)
        return replace(stored, shape=stored._resized(1, shards, stored.division))

    def _resized(self, times: int, divided_by: int, division: Division | None) -> tuple[int, ...]:
        if division is None:
            return self.shape
        sizes = list(self.shape)
        sizes[division.axis] = sizes[division.axis] * times // divided_by
        return tuple(sizes)


class MixerConfig:
    """Configuration of a sublayer's mixer: its sizes, the state that it keeps, and the cost of what it computes."""

    def state(self) -> tuple[StateArray, ...]:
        """The state arrays of each sequence.

        The arrays per slot and per token of a page hold the whole state of a sequence. For replay, each accumulating
        array also declares tails: the inputs from which `Operation.replay` computes it again. Windows always have
        tails.
        """
        return ()

    def parameters(self) -> Mapping[str, Placement]:
        """Every parameter by its dotted path from the mixer on, and how it is divided over devices."""
        raise NotImplementedError

    @property
    def inner_size(self) -> int:
        """Channels that its recurrence works on; 0 without one. For estimates of a step's temporaries."""
        return 0

    def flops(self, context: int) -> int:
        """Operations for one token that attends to `context` others, not counting products with weights."""
        return 0

    def sums_inside(self, shards: int) -> int:
        """Numbers of each token that devices add up inside of the mixer, before the sum of its results."""
        return 0


class RecurrenceConfig(MixerConfig):
    """A recurrent mixer under a letter of its own in the pattern; see `HybridConfig.recurrences`."""

    letter: str

    def make(self, hidden_size: int, *, rngs: Any, dtype: Any) -> Any:
        """The module: called with (x [T, hidden], layout, state), it returns (y [T, hidden], state).

        The state is a dict of the arrays declared, by name, or None for whole sequences. On several devices, the
        weights and states are the device's own pieces, and y is a partial sum.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class BothMixers(MixerConfig):
    """Mixers in one sublayer, by the names of their modules. The state is the pair of theirs."""

    mixers: tuple[tuple[str, MixerConfig], ...]

    def state(self) -> tuple[StateArray, ...]:
        return tuple(array for _, mixer in self.mixers for array in mixer.state())

    def parameters(self) -> Mapping[str, Placement]:
        return {f"{name}.{path}": put for name, mixer in self.mixers for path, put in mixer.parameters().items()}

    @property
    def inner_size(self) -> int:
        return max(mixer.inner_size for _, mixer in self.mixers)

    def flops(self, context: int) -> int:
        return sum(mixer.flops(context) for _, mixer in self.mixers)

    def sums_inside(self, shards: int) -> int:
        return sum(mixer.sums_inside(shards) for _, mixer in self.mixers)
