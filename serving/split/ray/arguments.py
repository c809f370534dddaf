"""The arguments of the Ray Serve application, sorted by recipient."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from serving.api.http.settings import ServerSettings
from serving.config import EngineConfig
from serving.split.settings import RouterSettings, SplitSettings

_FIXED = frozenset({"role", "advertise", "host", "port", "prefill", "decode", "resources"})
"""Settings that the application chooses itself."""


@dataclass(frozen=True)
class Arguments:
    """Settings of workers, their servers, the router and the engines. Some settings have several recipients."""

    split: dict[str, Any]
    server: dict[str, Any]
    routing: dict[str, Any]
    engine: dict[str, Any]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Arguments:
        """Sorts the arguments of an application. Creates a secret unless one is given.

        Raises:
            ConfigError: an unknown setting or an invalid value.
        """
        named = {"split_secret": secrets.token_hex(32)} | {k: v for k, v in arguments.items() if k not in _FIXED}
        split, server, routing = (
            {name: value for name, value in named.items() if name in kind.model_fields}
            for kind in (SplitSettings, ServerSettings, RouterSettings)
        )
        known = {*split, *server, *routing}
        sorted_settings = cls(
            split, server, routing, {name: value for name, value in named.items() if name not in known}
        )
        # Validate here, so that errors do not appear only in a replica's log.
        SplitSettings.create(**split)
        ServerSettings.create(**server)
        RouterSettings.create(**routing)
        EngineConfig.create(**sorted_settings.engine)
        return sorted_settings
