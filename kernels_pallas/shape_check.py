"""Checking the shapes of an operation's arguments by the names of their dimensions."""

from typing import Any


def check_shapes(operation: str, **arguments: tuple[Any, str]) -> dict[str, int]:
    """Binds dimension names to sizes over all arguments, each given as (array, "names of its dimensions").

    A dimension may also be written as a number or as `name-1`, of a name bound by an earlier argument.

    Returns:
        The size of every name.
    Raises:
        ValueError: an argument has another rank, or a dimension differs from what another argument says.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for argument, (array, pattern) in arguments.items():
        names, shape = pattern.split(), tuple(array.shape)
        if len(names) != len(shape):
            raise ValueError(f"{operation}: {argument} has shape {shape}, expected [{', '.join(names)}]")
        for name, size in zip(names, shape, strict=True):
            if name.isdigit():
                expected, source = int(name), "always"
            elif name.endswith("-1"):
                expected, source = sizes[name[:-2]] - 1, f"by {origin[name[:-2]]}"
            else:
                expected, source = sizes.setdefault(name, size), f"by {origin.setdefault(name, argument)}"
            if size != expected:
                layout = f"[{', '.join(names)}] with {name} = {expected} ({source})"
                raise ValueError(f"{operation}: {argument} has shape {shape}, expected {layout}")
    return sizes


def check_groups(operation: str, heads: int, groups: int) -> None:
    """Raises ValueError unless the heads divide evenly into the groups."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{operation}: {heads} heads do not divide into {groups} groups")
