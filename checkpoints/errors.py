"""The one error that a person sees when a checkpoint cannot be used."""

from __future__ import annotations

from collections.abc import Iterable

LISTED = 6
"""How many names an error spells out before it only counts them."""


class CheckpointError(ValueError):
    """A checkpoint, or a reference to one, that cannot be used. The message is one line and meant for the user."""


def listing(items: Iterable[str], shown: int = LISTED) -> str:
    """Returns the first few of `items`, comma separated, then the number of the others. Keeps messages short."""
    items = list(items)
    more = len(items) - shown
    return ", ".join(items[:shown]) + (f", and {more} more" if more > 0 else "")


def one_line(error: object, most: int = 300) -> str:
    """Returns the text of an error of another library on one line of at most `most` characters; its type if it has no
    text. What cannot be encoded or printed is escaped: it may come from a file."""
    text = " ".join(str(error).split())[:most]
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text) or type(error).__name__
