"""The error of a wrong model configuration, and checks that its parts share."""

from typing import TypeVar

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
