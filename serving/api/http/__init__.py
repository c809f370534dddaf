"""The OpenAI-compatible HTTP server. `create_app(async_engine, settings)` creates the application.

Names are imported on first use, so that settings can be read without importing FastAPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving.api.http.app import create_app
    from serving.api.http.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from serving.api.http.app import create_app

        return create_app
    if name == "ServerSettings":
        from serving.api.http.settings import ServerSettings

        return ServerSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
