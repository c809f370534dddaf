"""Errors of requests that the engine refuses or that cannot continue."""

from serving.core import RequestError

__all__ = ["RequestError", "RequestFailed"]


class RequestFailed(RuntimeError):
    """A valid request could not be served. The message is one line."""
