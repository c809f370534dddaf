"""What mixers with a linear recurrence declare alike: heads in groups with one query and key, two convolutions."""

from __future__ import annotations

from typing import ClassVar

from mamba_jax.config.declaration import Division, Role, StateArray, StateUnit, UnevenDivision
from mamba_jax.config.errors import ModelConfigError, positive


class GroupedRecurrence:
    """Sizes, states and divisions of such a mixer. The inner width is `num_heads * head_dim`."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    of_heads: ClassVar[str]
    """How messages call the heads."""
    of_groups: ClassVar[str]
    arrays: ClassVar[tuple[str, str, str]]
    """Names of the layer's arrays in the store: states, and windows of the convolutions of values, and of vectors."""
    erases: ClassVar[bool]
    """Whether the recurrence erases; see `kernels_pallas.recurrence`."""

    def check_sizes(self) -> None:
        """Raises ModelConfigError where sizes do not fit."""
        positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")
        if self.num_heads % self.num_groups:
            raise ModelConfigError(
                f"{self.num_heads} {self.of_heads} cannot be divided into {self.num_groups} {self.of_groups}"
            )

    @property
    def inner_size(self) -> int:
        """Channels of the values, of the gate and of the output."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of the keys, and of the queries."""
        return self.num_groups * self.state_size

    @property
    def num_decays(self) -> int:
        """Of a token."""
        return self.num_heads

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, and windows of raw convolution inputs, oldest first: of values; of queries and keys.

        The tail of the recurrent state is that of `kernels_pallas.recurrence.Tail`.
        """
        (name, values, vectors), window = self.arrays, self.conv_width - 1
        recurrent = (self.num_heads, self.head_dim, self.state_size)
        kernels = ("tpu", "gpu") if self.erases else ("tpu", "gpu", "cpu")

        def tail(field: str, size: int, role: Role, division: Division) -> StateArray:
            return StateArray(f"{name}_{field}", (size,), role, division, StateUnit.TAIL, of=name)

        heads, kept = self._heads(0), Role.STEERING if self.erases else Role.ACTIVATION
        # A device keeps the groups that its heads need, though it has computed all.
        own_groups = Division(0, self.num_groups, self.of_groups, otherwise=UnevenDivision.REPEAT)
        arrays = (
            StateArray(name, recurrent, Role.ACCUMULATED, heads, replay_kernels=kernels),
            StateArray(values, (window, self.inner_size), Role.WINDOW, self._heads(1)),
            StateArray(vectors, (window, 2 * self.key_size), Role.WINDOW, self._groups(1, parts=2)),
            tail("value", self.inner_size, kept, heads),
            tail("key", self.key_size, Role.ACTIVATION, own_groups),
            tail("log_decay", self.num_decays, Role.STEERING, heads),
        )
        return arrays if self.erases else (*arrays, tail("strength", self.num_heads, Role.STEERING, heads))

    def _heads(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.num_heads, self.of_heads, rank=rank)

    def _groups(self, axis: int, *, parts: int = 1, rank: int = 2) -> Division:
        return Division(axis, self.num_groups, self.of_groups, parts=parts, otherwise=UnevenDivision.SHARE, rank=rank)
