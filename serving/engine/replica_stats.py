"""What several engines have counted, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from serving.core.tiers.tiers import FetchStats
from serving.engine.draft_stats import DraftStats


def merged(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`Engine.stats()` of several engines as of one, and each one's own under `engines`.

    Counters are added up. Weights have one version, unless some have been replaced and others not yet.
    """
    whole = _added(stats)
    versions = dict.fromkeys(each["weights"]["version"] for each in stats)
    whole["weights"] = {
        "version": ", ".join(versions),
        "updates": max(each["weights"]["updates"] for each in stats),
    }
    if "tiers" in whole:
        whole["tiers"] = _tiers([each["tiers"] for each in stats])
    whole["drafts"] = DraftStats(**whole["loop"]["drafts"]).summary()
    whole["engines"] = list(stats)
    return whole


def _tiers(engines: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each has fetched its own; what tiers hold, they hold for all."""
    own = [field.name for field in fields(FetchStats)]
    return {
        name: shared | {key: sum(engine[name][key] for engine in engines) for key in own}
        for name, shared in engines[0].items()
    }


def _added(values: Sequence[Any]) -> Any:
    """Numbers are added, also those in lists and in dictionaries; of anything else the first that is not None."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([value.get(name) for value in values]) for name in names}
    if isinstance(first, list):
        return [sum(column) for column in zip_longest(*(value or [] for value in values), fillvalue=0)]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value for value in values if value is not None)
    return first
