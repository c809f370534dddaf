"""Errors of settings and requests, and the reasons that users see, in words that they can read."""

from enum import StrEnum


class MissReason(StrEnum):
    """Why a request could reuse nothing. Reported per request and counted."""

    CACHING_OFF = "caching is off"
    PROMPT_LOGPROBS = "prompt log-probabilities asked: every prompt token is computed"
    TOO_SHORT = "too short: the shared prefix ends before its first checkpoint"
    NOT_FOUND = "not found: no earlier request began like this"
    EVICTED = "evicted: the prefix was cached and has been dropped"
    STATE_EVICTED = "state evicted: the pages are present, the state is not"
    NOT_YET_WRITTEN = "not yet written: a request of the same step computes this prefix"
    WEIGHTS_CHANGED = "weights changed: the prefix was cached under the weights before"
    SALT_DIFFERS = "salt differs: the prefix is cached without a salt"


class WaitReason(StrEnum):
    """Why a request is in the queue."""

    PAUSED = "paused: it came after new requests were held back"
    SIBLING = "prompt: another choice of the request computes it"
    BLOCKED = "constraint: the engine computes its masks"
    ROWS = "rows: max_num_seqs requests run"
    LONG_PROMPTS = "long prompts: enough of them are being computed"
    MEMORY = "memory: too few pages are free"
    SLOTS = "slots: no state slot is free"
    STEP = "step: other prompts use its tokens or rows"
    TURN = "turn: others come first"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ConfigError(ValueError):
    """A wrong setting. The message is one line: the setting, its value and the allowed values."""


class RequestError(ValueError):
    """A request that cannot be served. The message is one line: the wrong value, and the allowed values.

    `retry` is true where the same request may be taken later (the queue is full).
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def check_prompt_length(length: int, max_model_len: int, *, at_least: bool = False) -> None:
    """Raises `RequestError` for a prompt of more tokens than sequences may have, less one for the output.

    `at_least`: it has so many or more; not all of them were counted. Clients look for "maximum context length", "prompt
    is too long" or "exceeds the context window".
    """
    if length >= max_model_len:
        raise RequestError(
            f"the prompt has {'at least ' * at_least}{length} tokens: at most {max_model_len - 1} are allowed "
            "(the prompt is too long and exceeds the context window: "
            f"this model's maximum context length is {max_model_len} tokens, one of them for the output)"
        )


class RequestFailed(RuntimeError):
    """A valid request could not be served. The message is one line."""
