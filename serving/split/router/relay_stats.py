"""Counters of the requests that a router forwards."""

from dataclasses import dataclass


@dataclass
class RelayStats:
    """Counters of requests."""

    requests: int = 0
    split: int = 0
    """Requests with prompts that a prefill worker computed."""
    shared: int = 0
    """Requests for which the router offered another decode worker's state to the worker."""
    alone: int = 0
    """Requests that a decode worker computed alone."""
    prefill_retries: int = 0
    decode_retries: int = 0
    late: int = 0
    """Requests that exceeded their deadline."""
