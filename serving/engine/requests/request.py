"""Requests to the engine, and checks of their prompts and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpoints.tokenizer import Tokenizer
from serving.core import Mark, RemoteState
from serving.engine.request_error import RequestError
from serving.engine.requests.sampling_params import SamplingParams, from_table

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""
_PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "cache_marks"})
"""Fields of a prompt; `LLM.generate` reads the last two."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, with vLLM's fields."""

    lora_name: str
    """Requests with this name and path use the adapter that the first of them loaded."""
    lora_int_id: int
    """Not used. The engine distinguishes adapters by name, and their cached states by content."""
    lora_path: str
    """A directory with LoRA matrices as PEFT saves them, a learned initial state, or both."""


@dataclass(frozen=True)
class EngineRequest:
    """A request, from its caller to the engine that runs it."""

    request_id: str
    """Any text that no unfinished request uses."""
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Requests with smaller values are served first."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    cache_marks: tuple[Mark, ...] = ()
    """Positions of the prompt at which a state is worth keeping; of more than 8, the deepest."""
    message_digests: tuple[int, ...] = ()
    """Those of the conversation (`changed_prefixes`), to say which message keeps it from reusing an earlier one."""
    client: str | None = None
    """The client that sent the request; waiting clients are served in turn."""
    batch_id: str | None = None
    """Request id of the first of several prompts of one call; the queue treats them as one request."""
    live: bool = False
    """Return new output after each step, as deltas. Otherwise the finished output contains all of it."""
    lora_request: LoRARequest | None = None
    """The adapter; None uses the model as it is."""
    adapter_content: Any = None
    """The `ReadAdapter` of the adapter, if the caller has read its files."""
    remote: RemoteState | None = None
    """The state of the prompt on another worker. Ignored if prompt log-probabilities are requested, or if the state was
    computed with another salt, other weights or another adapter."""
    export: Any = None
    """Receives the state at the prompt's end, for `split.prefill_side`."""


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, list[int]]:
    """Returns a prompt's text, if it has one, and its token ids. May be called from any thread.

    Args:
        prompt: the user's prompt.
        tokenizer: None = only token ids are allowed.
        vocab_size: the model's vocabulary size; token ids must be smaller.

    Raises:
        RequestError: the prompt is not valid.
    """
    given: Any = prompt
    if isinstance(prompt, (list, tuple)):
        return None, _token_ids(prompt, vocab_size)
    if isinstance(prompt, Mapping):
        for name, value in prompt.items():
            if name not in _PROMPT_FIELDS and value is not None:
                raise RequestError(f"a prompt's field {name!r} is not supported: use 'prompt' or 'prompt_token_ids'")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"], vocab_size)
        if "prompt" not in prompt:
            raise RequestError("a prompt is a text, {'prompt': text} or {'prompt_token_ids': [...]}")
        given = prompt["prompt"]
    if not isinstance(given, str):
        raise RequestError(f"a prompt must be a text, got {type(given).__name__}")
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: give 'prompt_token_ids' instead of a text")
    ids = tokenizer.encode(given)
    if not ids:
        raise RequestError("the prompt is empty")
    return given, ids


def read_marks(given: Any) -> tuple[Mark, ...]:
    """Returns the marks of a prompt's field `cache_marks`: positions, or tables such as `{"position": 90, "ttl": 300}`.

    Raises:
        RequestError: it is not a list of these, or a value is not allowed.
    """
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return tuple(Mark(each) if isinstance(each, int) else from_table(Mark, each, "cache_marks") for each in listed)


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raises `RequestError` for parameters that this model cannot serve."""
    if params.stop and tokenizer is None:
        raise RequestError("stop texts need a tokenizer, which this model does not have; use stop_token_ids")
    for token in params.logit_bias or ():
        if token >= vocab_size:
            raise RequestError(f"logit_bias: token id {token} is not in the vocabulary (0 to {vocab_size - 1})")
    for token in params.prompt_logprob_token_ids or ():
        if token >= vocab_size:
            raise RequestError(
                f"prompt_logprob_token_ids: token id {token} is not in the vocabulary (0 to {vocab_size - 1})"
            )


def _token_ids(given: Any, vocab_size: int) -> list[int]:
    plain = type(given) is list and set(map(type, given)) <= {int}  # usual for long prompts; faster than checking each
    try:
        ids = given.copy() if plain else [int(token) for token in given if not isinstance(token, (bool, str))]
        wrong = not plain and (len(ids) != len(given) or any(i != t for i, t in zip(ids, given, strict=True)))
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong or isinstance(given, (str, bytes, Mapping)):
        raise RequestError("prompt_token_ids must be a list of integers")
    if not ids:
        raise RequestError("the prompt is empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"prompt_token_ids: {bad} is not in the vocabulary (0 to {vocab_size - 1})")
    return ids
