"""The sampling parameters of a request, with vLLM's names and defaults."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, StrictBool, StrictStr
from pydantic.dataclasses import dataclass

from serving.core.errors import RequestError
from serving.engine.requests.stop_text import StopAutomaton
from serving.settings import Integer, Number, checks_names, listed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from serving.engine.structured.grammars import StructuredOutputs
    from serving.engine.structured.reasoning import Reasoning
else:
    StructuredOutputs = Reasoning = Any

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


Id = Annotated[Integer, Field(ge=0, le=_INT32)]
Key = Annotated[int, Field(ge=0, le=_INT32, strict=True)]
_texts = listed(str, "texts")
_stop_ids, _scored_ids = (listed(numbers.Integral, "token ids", n) for n in (MAX_STOP_IDS, MAX_PROMPT_LOGPROB_IDS))


def _stop(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else _texts(value)


def few_biases(value: Any) -> Any:
    """Returns a table of biases by number, where JSON has texts; one that is too long is looked at no further."""
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries: at most {MAX_LOGIT_BIAS} are allowed")
    return {_token(key): bias for key, bias in value.items()}


def _token(key: Any) -> Any:
    numeral = isinstance(key, numbers.Integral) or (isinstance(key, str) and len(key) < 20 and key.strip().isdecimal())
    return int(key) if numeral else key


@checks_names("sampling parameter", NEAREST, is_neutral)
@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class SamplingParams:
    """Sampling parameters of one request.

    Raises:
        RequestError: a value has the wrong type or is out of range; the message names it and the allowed values.
    """

    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    """Number of independent outputs."""
    temperature: Annotated[Number, Field(ge=0, le=_LARGEST)] = 1.0
    """Values below 0.00001, including 0, are greedy."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: Annotated[Integer, Field(ge=-1, le=_INT32)] = -1
    """Keep this many tokens; -1 or 0 keeps all."""
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Drop tokens with less than this fraction of the likeliest token's probability."""
    seed: Annotated[Integer, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    """A seeded request gives the same output regardless of other requests."""
    max_tokens: Annotated[Integer, Field(ge=1, le=_INT32)] | None = 16
    """Maximum number of output tokens; None: until the model's length is reached."""
    min_tokens: Id = 0
    """Number of output tokens before which neither an end-of-sequence token nor a stop id may occur."""
    stop: Annotated[str | Sequence[str] | None, PlainValidator(_stop)] = None
    """Texts that end the output. The output contains them only with `include_stop_str_in_output`."""
    stop_token_ids: Annotated[Sequence[Id], BeforeValidator(_stop_ids)] | None = None
    """Tokens that end the output."""
    stop_after: tuple[StrictStr, Annotated[StrictStr, Field(min_length=1)]] | None = None
    """The marks around reasoning, in which stop texts do not count; the first is "" if the prompt ends within it."""
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    """Continue after an end-of-sequence token."""
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the log-probability of each output token, and of this many likeliest tokens."""
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The same for the tokens of the prompt."""
    prompt_logprob_token_ids: Annotated[Sequence[Id], BeforeValidator(_scored_ids)] | None = None
    """Report the log-probabilities of these tokens at each position of the prompt, in addition to those of the prompt's
    own tokens (`prompt_logprobs` is then at least 0)."""
    return_sampling_mask: StrictBool = False
    """Report which tokens each output token was drawn from. The engine needs the flag `enable_return_sampling_mask`."""
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=1 / _LARGEST, le=_LARGEST)] = 1.0
    logit_bias: Annotated[Mapping[Key, float], BeforeValidator(few_biases)] | None = None
    """Added to the logits of these token ids."""
    detokenize: StrictBool = True
    """False: only token ids are returned; `text` stays empty, and stop texts cannot be used."""
    skip_special_tokens: StrictBool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output must have. An engine without `LLM` needs the flag `enable_structured_outputs`."""
    reasoning: Reasoning | None = None
    """Allows reasoning at the beginning of the output, with a token budget; the form applies after it. The engine needs
    the same flag."""

    def __post_init__(self) -> None:
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        # Convert lists to tuples, so that requests can share parameters safely.
        for name in ("stop", "stop_token_ids", "prompt_logprob_token_ids"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        stop = self.stop or ()
        if any(not text for text in stop):
            raise RequestError("stop must not hold an empty text")
        if (length := sum(map(len, stop))) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has {length:,} characters in total: at most {MAX_STOP_CHARACTERS:,} are allowed; use fewer or "
                f"shorter texts"
            )
        if stop and not self.detokenize:
            raise RequestError("stop texts need detokenize=True (stop_token_ids work without)")
        if self.prompt_logprob_token_ids and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", 0)
        bias = {token: min(max(value, -100.0), 100.0) for token, value in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", bias or None)
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


def recommended_sampling(model: str) -> dict[str, Any]:
    """Returns the sampling parameters that a checkpoint recommends in `generation_config.json`.

    Raises:
        CheckpointError: the file is invalid.
    """
    from checkpoints import generation_config

    found = generation_config(model)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(found, name)) is not None}
