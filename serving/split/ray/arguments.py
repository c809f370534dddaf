"""The arguments of the Ray Serve application, sorted by who they are for."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from serving.api.http.settings import ServerSettings
from serving.config import EngineConfig
from serving.split.settings import RouterSettings, SplitSettings

_FIXED = frozenset({"role", "advertise", "host", "port", "prefill", "decode", "resources"})
"""Where and as what each one listens is the application's own business."""


@dataclass(frozen=True)
class Arguments:
    """What goes to workers, to their servers, to the router and to the engines. Some settings go to several."""

    split: dict[str, Any]
    server: dict[str, Any]
    routing: dict[str, Any]
    engine: dict[str, Any]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Arguments:
        """Of an application; it has a secret of its own unless one is given.

        Raises:
            ConfigError: an unknown setting or an invalid value.
        """
        named = {"split_secret": secrets.token_hex(32)} | {k: v for k, v in given.items() if k not in _FIXED}
        split, server, routing = (
            {name: value for name, value in named.items() if name in kind.model_fields}
            for kind in (SplitSettings, ServerSettings, RouterSettings)
        )
        known = {*split, *server, *routing}
        found = cls(split, server, routing, {name: value for name, value in named.items() if name not in known})
        # Mistakes show at once, and not in the log of a replica.
        SplitSettings.create(**split)
        ServerSettings.create(**server)
        RouterSettings.create(**routing)
        EngineConfig.create(**found.engine)
        return found
