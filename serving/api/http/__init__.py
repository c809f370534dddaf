"""The OpenAI-compatible HTTP server. `create_app(async_engine, settings)` makes it."""

from serving.api.http.app import create_app
from serving.api.http.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
