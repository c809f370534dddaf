"""Declarations of a mixer: the state that it keeps of a sequence, and how its arrays are divided over devices.

Store, sizes, sharding, transfer and plans use only these declarations and do not depend on any mixer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar


class UnevenDivision(enum.Enum):
    """How to handle an axis whose units do not divide evenly over the devices."""

    REFUSE = "refuse"
    """Raise an error."""
    KEEP_WHOLE = "keep whole"
    """Every device has all of it."""
    SHARE = "share"
    """Every device has the whole axis and uses one unit, shared with others; devices are a multiple of units."""
    REPEAT = "repeat"
    """Each device has one unit, shared with others, so each unit is stored on several devices."""


@dataclass(frozen=True)
class Division:
    """How an array is divided over devices: along one axis, in units that must stay whole."""

    axis: int
    """The axis of a parameter, or of a state's part in a slot or of a token."""
    units: int
    """Heads, groups or channels along the axis."""
    what: str
    """The name of the units in error messages."""
    parts: int = 1
    """The axis concatenates this many arrays, each with all units. Each device has its units of the first array, then
    its units of the second, and so on."""
    otherwise: UnevenDivision | Division = UnevenDivision.REFUSE
    repeat: int = 1
    """Number of devices that have the same unit."""
    rank: int = 2
    """Number of axes of a weight matrix; outputs and inputs are the last two. Used if it is quantized."""

    def moved(self, axes: int) -> Division:
        """Returns the same division, a number of axes further back."""
        otherwise = self.otherwise.moved(axes) if isinstance(self.otherwise, Division) else self.otherwise
        return replace(self, axis=self.axis + axes, otherwise=otherwise)

    def over(self, shards: int) -> Division | None:
        """Returns the division over this number of devices; None if every device has all of the array.

        Raises:
            ModelConfigError: the units do not divide, and nothing else is declared.
        """
        if self.units % shards == 0:
            return self
        if isinstance(self.otherwise, Division):
            return self.otherwise.over(shards)
        if self.otherwise is UnevenDivision.KEEP_WHOLE:
            return None
        if self.otherwise is UnevenDivision.REFUSE:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} does not divide this model's {self.units} {self.what}: use a divisor"
            )
        if shards % self.units:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} neither divides this model's {self.units} {self.what} "
                "nor is a multiple of them: use a divisor or a multiple"
            )
        return None if self.otherwise is UnevenDivision.SHARE else replace(self, repeat=shards // self.units)


class Replication(enum.Enum):
    """A parameter that every device has completely."""

    WHOLE = "whole"
    ADDED_ONCE = "added once"
    """The parameter is added to a partial sum, which only one device may do."""


WHOLE, ADDED_ONCE = Replication.WHOLE, Replication.ADDED_ONCE
Placement = Division | Replication
"""Of a parameter."""


def declared(*groups: tuple[Placement, str] | tuple[Placement, str, object]) -> dict[str, Placement]:
    """Returns parameters by name, of placements with the names that have them; a group may have a condition."""
    return {name: placement for placement, names, *given in groups if all(given) for name in names.split()}


class Role(enum.Enum):
    """The role of a state's numbers, which determines their dtype."""

    ACCUMULATED = "accumulated"
    """A recurrent state, which every token updates and rounds."""
    WINDOW = "window"
    """The last few raw inputs."""
    ACTIVATION = "activation"
    """Activations of one token."""
    GATE = "gate"
    """Parameters of a recurrence, or what is added to its state: always float32."""


class StateUnit(enum.Enum):
    """The unit that an array belongs to."""

    SLOT = "slot"
    TOKEN = "token"
    """A token of a page."""
    TAIL = "tail"
    """A token of a tail: the inputs since a running row's anchor; see `mamba_jax.store`."""


@dataclass(frozen=True)
class StateArray:
    """An array that a sublayer keeps of each sequence."""

    name: str
    """Sublayers of a model that use the same name declare the same array."""
    shape: tuple[int, ...]
    """The shape of one slot's part, or of one token's part in a page or a tail."""
    role: Role
    division: Division | None
    """The division over devices; None if every device has the whole array."""
    per: StateUnit = StateUnit.SLOT
    of: str = ""
    """For a tail: the name of the array in slots whose inputs it holds."""
    last: int | None = None
    """For a tail: number of tokens before a step that are needed; None: all since the anchor."""
    replay_kernels: tuple[str, ...] = ()
    """For accumulating arrays: platforms ("tpu", "gpu", "cpu") with a replay kernel, where replay may be chosen. On
    CPU, this is a native operation, which an installation may lack."""

    def inputs(self) -> StateArray:
        """Returns the tail of a window: its inputs."""
        return StateArray(
            f"{self.name}_inputs",
            self.shape[1:],
            Role.WINDOW,
            self.division and self.division.moved(-1),
            StateUnit.TAIL,
            of=self.name,
            last=self.shape[0],
        )

    @property
    def padded(self) -> bool:
        """Whether the last axis is padded to the device's lanes; see `mamba_jax.store_layout`."""
        gates_replay = self.per is StateUnit.TAIL and self.role is Role.GATE
        return self.per is StateUnit.TOKEN or self.role is Role.ACCUMULATED or gates_replay

    def copied_by_slots(self, lanes: int) -> bool:
        """Returns whether a device with this many lanes copies a slot as contiguous memory.

        This holds for windows (see `kernels_pallas.windows`); `shape` is then one device's part of a slot.
        """
        return lanes > 1 and self.per is StateUnit.SLOT and self.role is Role.WINDOW and self.shape[-1] % lanes == 0

    def size(self, lanes: int = 1) -> int:
        """Returns the number of elements, padding included."""
        *rest, last = self.shape
        if self.copied_by_slots(lanes):
            # A register has 8 rows of lanes; fewer rows are padded to 2 or 4.
            rows = rest[-1]
            rest[-1] = 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8
        return math.prod(rest) * (-(-last // lanes) * lanes if self.padded else last)

    def dtype(self, dtype: Any, ssm_dtype: Any) -> Any:
        """Returns `ssm_dtype` for accumulated states, float32 for gates, and `dtype` for all others."""
        if self.role is Role.GATE:
            return "float32"
        return ssm_dtype if self.role is Role.ACCUMULATED else dtype

    def over(self, shards: int) -> StateArray:
        """Returns the array as this number of devices store it together.

        Raises:
            ModelConfigError: it does not divide over them.
        """
        division = self.division and self.division.over(shards)
        return replace(self, shape=self._resized(division.repeat if division else 1, 1, division), division=division)

    def on_each(self, shards: int) -> StateArray:
        """Returns the array as each of this number of devices has it.

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
    """Configuration of a sublayer's mixer: its sizes, the state that it keeps, and the cost of what it computes.

    `mamba_jax.modules.blocks.MIXERS` has the module of each.
    """

    def at(self, index: int) -> Self:
        """Returns the configuration of sublayer `index`, counted from 0 over the model's sublayers of this kind."""
        return self

    def state(self) -> tuple[StateArray, ...]:
        """Returns the state arrays of each sequence.

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
        """Channels of the mixer's recurrence; 0 without one. Used to estimate a step's temporaries."""
        return 0


class RecurrenceConfig(MixerConfig):
    """A recurrent mixer with its own letter in the pattern; see `HybridConfig.recurrences`."""

    letter: str
    varying_bits: ClassVar[str] = ""
    """The recurrence's name in messages, if its bits depend on the schedule (see `schedule_invariant`)."""
    varying_bits_of_kernels: ClassVar[str] = ""
    """The same, if they depend on it only on TPU and GPU."""


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


Part = TypeVar("Part")


class ModelConfigError(ValueError):
    """A model description is invalid, or describes something that is not supported."""


def need(part: Part | None) -> Part:
    """Returns a part of the config that is known to be there, because the pattern has sublayers of its kind.

    Raises:
        ModelConfigError: it is not.
    """
    if part is None:
        raise ModelConfigError("the model has no sublayer of this kind")
    return part


def positive(config: object, *names: str) -> None:
    """Raises ModelConfigError unless these fields are at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ModelConfigError(f"{name} is {getattr(config, name)}: at least 1 is expected")


def wide_enough(conv_width: int) -> None:
    """Raises ModelConfigError unless a convolution sees an input before the current one."""
    if conv_width < 2:
        raise ModelConfigError(f"a convolution over {conv_width} inputs: at least 2 are expected")
