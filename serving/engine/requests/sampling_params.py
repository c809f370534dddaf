"""The sampling parameters of a request, with vLLM's names and defaults."""

from __future__ import annotations

import functools
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from serving.core.errors import RequestError
from serving.engine.requests.stop_text import StopAutomaton
from serving.settings import checks_names

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from serving.engine.structured.grammars import StructuredOutputs
    from serving.engine.structured.reasoning import Reasoning

T = TypeVar("T", bound="DataclassInstance")

MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PROMPT_LOGPROB_IDS = 300, 1024, 128
"""Copies of the values in `mamba_jax.sampling.table`, because importing it would import JAX. A test compares them."""
MAX_STOP_IDS = 32
MAX_STOP_CHARACTERS = 4096
"""Maximum length of all stop texts of a request together."""
MAX_CHOICES = 128
_INT32 = 2**31 - 1
"""Largest integer in the device's tables."""
_INT64 = 2**63 - 1
_LEAST_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy, because the divided logits might not be finite."""
_LARGEST = 1e6
"""Maximum value by which logits are multiplied or divided."""


NEAREST = {
    "allowed_token_ids": "give each allowed token logit_bias 100, or use structured_outputs with choice",
    "bad_words": "give the tokens of these words logit_bias -100",
    "best_of": "use n, and choose among the outputs by cumulative_logprob",
    "early_stopping": "beam search is not supported; use n",
    "extra_args": "pass each argument by its name",
    "flat_logprobs": "use logprobs",
    "guided_decoding": "use structured_outputs",
    "length_penalty": "beam search is not supported; use n",
    "logits_processors": "use logit_bias, or structured_outputs with a grammar",
    "output_kind": "LLM.stream returns the output as it grows, and AsyncEngine.stream deltas",
    "skip_clone": "parameters are never changed, so they need no copy",
    "spaces_between_special_tokens": "use skip_special_tokens",
    "thinking_token_budget": "use reasoning with a budget",
    "truncate_prompt_tokens": "cut the prompt's token ids before the call",
    "use_beam_search": "beam search is not supported; use n",
}
"""vLLM's parameters that are not supported, and the nearest way."""
_NEUTRAL = {
    "best_of": 1, "length_penalty": 1.0, "n_predict": -1, "repeat_penalty": 1.0, "spaces_between_special_tokens": True,
    "tfs_z": 1.0, "top_n_sigma": -1, "typical_p": 1.0,
}  # fmt: skip
"""Values of these, and of other servers' names, that ask for nothing; for the others, every false value does."""

_ONLY_NONE = ("thinking_token_budget", "allowed_token_ids", "json_schema", "random_seed", "max_new_tokens")
"""Of these, only None asks for nothing."""


def is_neutral(name: str, value: object) -> bool:
    """Returns whether a value of an unsupported parameter asks for nothing."""
    if name in _ONLY_NONE or name.startswith("guided_"):
        return value is None
    plain = isinstance(value, (Sequence, Mapping, numbers.Number, type(None)))  # an array has no truth value
    return plain and (not value or value == _NEUTRAL.get(name))


@checks_names("sampling parameter", NEAREST, is_neutral)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        RequestError: a value has the wrong type or is out of range; the message names it and the allowed values.
    """

    n: int = 1
    """Number of independent outputs."""
    temperature: float = 1.0
    """Values below 0.00001, including 0, are greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int = -1
    """Keep this many tokens; -1 or 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens with less than this fraction of the likeliest token's probability."""
    seed: int | None = None
    """A seeded request gives the same output regardless of other requests."""
    max_tokens: int | None = 16
    """Maximum number of output tokens; None: until the model's length is reached."""
    min_tokens: int = 0
    """Number of output tokens before which neither an end-of-sequence token nor a stop id may occur."""
    stop: str | Sequence[str] | None = None
    """Texts that end the output. The output contains them only with `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output."""
    stop_after: tuple[str, str] | None = None
    """The marks around reasoning, in which stop texts do not count; the first is "" if the prompt ends within it."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    logprobs: int | None = None
    """Report the log-probability of each output token, and of this many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    prompt_logprob_token_ids: Sequence[int] | None = None
    """Report the log-probabilities of these tokens at each position of the prompt, in addition to those of the prompt's
    own tokens (`prompt_logprobs` is then at least 0)."""
    return_sampling_mask: bool = False
    """Report which tokens each output token was drawn from. The engine needs the flag `enable_return_sampling_mask`."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    detokenize: bool = True
    """False: only token ids are returned; `text` stays empty, and stop texts cannot be used."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output must have. An engine without `LLM` needs the flag `enable_structured_outputs`."""
    reasoning: Reasoning | None = None
    """Allows reasoning at the beginning of the output, with a token budget; the form applies after it. The engine needs
    the same flag."""

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_CHOICES)
        self._number("temperature", 0.0, _LARGEST)
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        self._number("top_p", 0.0, 1.0, above=True)
        self._integer("top_k", -1, _INT32)
        self._number("min_p", 0.0, 1.0)
        self._integer("seed", -_INT64 - 1, _INT64, optional=True)
        self._integer("max_tokens", 1, _INT32, optional=True)
        self._integer("min_tokens", 0, _INT32 if self.max_tokens is None else self.max_tokens)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 1 / _LARGEST, _LARGEST)
        flags = "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "return_sampling_mask"
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        # Convert lists to tuples, so that requests can share parameters safely.
        stop = (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", str, "texts")
        if any(not text for text in stop):
            raise RequestError("stop must not hold an empty text")
        if (length := sum(map(len, stop))) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has {length:,} characters in total: at most {MAX_STOP_CHARACTERS:,} are allowed; use fewer or "
                f"shorter texts"
            )
        if stop and not self.detokenize:
            raise RequestError("stop texts need detokenize=True (stop_token_ids work without)")
        object.__setattr__(self, "stop", stop)
        if self.stop_after is not None and (len(marks := self._tuple("stop_after", str, "texts")) != 2 or not marks[1]):
            raise RequestError("stop_after must be two texts: the marks around reasoning")
        object.__setattr__(self, "stop_token_ids", self._tuple("stop_token_ids", int, "token ids", MAX_STOP_IDS))
        scored = self._tuple("prompt_logprob_token_ids", int, "token ids", MAX_PROMPT_LOGPROB_IDS)
        object.__setattr__(self, "prompt_logprob_token_ids", scored)
        if scored and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", 0)
        object.__setattr__(self, "logit_bias", self._bias())
        if self.structured_outputs is not None:
            from serving.engine.structured.grammars import StructuredOutputs

            form = from_table(StructuredOutputs, self.structured_outputs, "structured outputs")
            object.__setattr__(self, "structured_outputs", form)
        if self.reasoning is not None:
            from serving.engine.structured.reasoning import Reasoning

            object.__setattr__(self, "reasoning", from_table(Reasoning, self.reasoning, "reasoning"))

    @functools.cached_property
    def stop_automaton(self) -> StopAutomaton:
        """Finds the stop texts; built once, and shared by all choices."""
        return StopAutomaton(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether sampling always chooses the likeliest token."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the tokens so far change the probabilities of the next."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def _integer(self, name: str, least: int, most: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
            allowed = f"from {least} up to {most}{' or None' if optional else ''}"
            raise RequestError(f"{name} must be an integer {allowed}, got {_shown(value)}")

    def _number(self, name: str, least: float, most: float, above: bool = False) -> None:
        value = getattr(self, name)
        # NaN fails the range check.
        wrong = isinstance(value, bool) or not isinstance(value, numbers.Real)
        wrong = wrong or not least <= value <= most
        if wrong or (above and value == least):
            allowed = f"{'above' if above else 'from'} {least:g} up to {most:g}"
            raise RequestError(f"{name} must be a number {allowed}, got {_shown(value)}")

    def _tuple(self, name: str, kind: type, what: str, most: int | None = None) -> tuple[Any, ...]:
        value, kinds = getattr(self, name), numbers.Integral if kind is int else kind
        if value is None:
            return ()
        wrong = isinstance(value, (str, bytes)) or not isinstance(value, Sequence)
        if wrong or any(isinstance(item, bool) or not isinstance(item, kinds) for item in value):
            raise RequestError(f"{name} must be a list of {what}, got {_shown(value)}")
        if kind is int and any(not 0 <= item <= _INT32 for item in value):
            raise RequestError(f"{name} must be a list of {what} (0 to {_INT32}), got {_shown(list(value))}")
        if most is not None and len(value) > most:
            raise RequestError(f"{name} has {len(value)} ids: at most {most} are allowed")
        return tuple(kind(item) for item in value)

    def _bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must be a table of token id to number, got {_shown(self.logit_bias)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS} are allowed")
        bias = {}
        for token, value in self.logit_bias.items():
            try:
                key, number = int(token), float(value)  # JSON's keys are strings
                key = key if isinstance(token, str) or key == token else -1
            except (TypeError, ValueError, OverflowError):
                key, number = -1, 0.0
            if not 0 <= key <= _INT32 or not math.isfinite(number):
                raise RequestError(
                    f"logit_bias must be a table of token id to finite number, got {_shown(token)}: {_shown(value)}"
                )
            bias[key] = min(max(number, -100.0), 100.0)
        return bias


def from_table(kind: type[T], value: T | Mapping[str, Any], what: str) -> T:
    """Returns `value` itself, or an object of a dataclass from a table of its fields, such as `{"regex": "[0-9]+"}`.

    Raises:
        RequestError: `value` is neither, or the table contains an invalid value. `what` names it in the message.
    """
    if isinstance(value, kind):
        return value
    names = [f.name for f in fields(kind)]
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise RequestError(f"{what}: a table with some of {', '.join(names)} is needed")
    return kind(**value)


def _shown(value: object) -> str:
    """Returns a value as shown in errors, shortened because clients can send megabytes."""
    return reprlib.repr(value)


def recommended_sampling(model: str) -> dict[str, Any]:
    """Returns the sampling parameters that a checkpoint recommends in `generation_config.json`.

    Raises:
        CheckpointError: the file is invalid.
    """
    from checkpoints import generation_config

    found = generation_config(model)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(found, name)) is not None}
