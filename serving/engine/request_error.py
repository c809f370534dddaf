"""What a request is refused with, wherever it is looked at, and what it ends with when it cannot go on."""


class RequestError(ValueError):
    """A request that cannot be served as asked: one line saying what was wrong and what is allowed.

    `retry` is true where the same request may be taken later (the queue is full).
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class RequestFailed(RuntimeError):
    """A request that was right, and could not be served all the same: one line that says why."""
