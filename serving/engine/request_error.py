"""The errors that a request is refused with, and that it ends with when it cannot continue."""

from serving.core import RequestError

__all__ = ["RequestError", "RequestFailed"]


class RequestFailed(RuntimeError):
    """A valid request that could not be served: one line that says why."""
