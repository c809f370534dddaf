"""Merges the statistics of several engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from serving.core.tiers.tiers import FetchStats
from serving.engine.requests.draft_stats import DraftStats


def merged(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the merged `Engine.stats()` of several engines, and those of each engine under `engines`.

    Counters are added. The weights have one version, unless only some engines have been updated.
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
    """Merges statistics of tiers: engines share the tiers' contents; their counters of fetches are added."""
    own = [field.name for field in fields(FetchStats)]
    return {
        name: shared | {key: sum(engine[name][key] for engine in engines) for key in own}
        for name, shared in engines[0].items()
    }


def _added(values: Sequence[Any]) -> Any:
    """Adds numbers, including those in lists and dictionaries. For other values, returns the first that is not None."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _added([value.get(name) for value in values]) for name in names}
    if isinstance(first, list):
        return [sum(column) for column in zip_longest(*(value or [] for value in values), fillvalue=0)]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value for value in values if value is not None)
    return first
