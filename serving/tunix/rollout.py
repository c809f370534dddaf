"""The engine as Tunix's rollout: https://github.com/google/tunix, `tunix.rl.rollout.base_rollout`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mamba_jax.model import HybridModel
from mamba_jax.version import install_advice
from serving.engine.llm import LLM
from serving.engine.requests.output import CompletionOutput
from serving.engine.requests.sampling_params import MAX_CHOICES, SamplingParams

try:
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"module {error.name!r} is not installed: {install_advice('tunix')}", name=error.name
    ) from None


class TunixRollout(BaseRollout):
    """An engine that Tunix's learners sample from.

        rollout_engine = functools.partial(TunixRollout, llm=llm)  # of ClusterConfig

    The cluster's actor must be a `TunixActor`. The engine has weights of its own, and Tunix sends it the actor's after
    each step. Repeated prompts, such as those of a group in GRPO, share one prefill.

    Args:
        rollout_actor: the actor; not used, because the engine has weights of its own.
        tokenizer: a `TunixTokenizer`, or another one that Tunix accepts. Prompts are encoded by the engine's.
        mesh: not used; the flags of `llm` decide where the engine runs.
        rollout_config: Tunix's parameters of sampling while it trains.
        llm: the engine. It must have the actor's weights when training begins.
        seed: seed of all samples; None: a new one at random each time.
    """

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: RolloutConfig | None = None,
        *,
        llm: LLM,
        seed: int | None = 0,
    ) -> None:
        del rollout_actor, mesh
        self._llm, self._tokenizer, self._config, self._seed = llm, tokenizer, rollout_config, seed
        self._requests = itertools.count()

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **options: Any) -> RolloutOutput:
        """Samples an answer to each prompt. `logprobs` are those of the engine's `logprobs_mode`; `logits` is None.

        Raises:
            RequestError: the engine cannot serve a prompt or a parameter.
            ValueError: a prompt is longer than `max_prompt_length`; or `options` are given, which only Tunix's own
                engines have.
        """
        if options:
            raise ValueError(f"options {sorted(options)} are not supported by TunixRollout")
        counts = [(prompt, len(list(same))) for prompt, same in itertools.groupby(prompts)]
        groups = [
            (prompt, min(MAX_CHOICES, count - begin))
            for prompt, count in counts
            for begin in range(0, count, MAX_CHOICES)
        ]
        params = [self._params(rollout_config, count) for _, count in groups]
        outputs = self._llm.generate([prompt for prompt, _ in groups], params, use_tqdm=False)
        pairs = [(output.prompt_token_ids, choice) for output in outputs for choice in output.outputs]
        return RolloutOutput(
            text=[choice.text for _, choice in pairs],
            logits=None,
            tokens=[np.array(choice.token_ids, np.int32) for _, choice in pairs],
            left_padded_prompt_tokens=self._padded([ids for ids, _ in pairs], rollout_config.max_prompt_length),
            logprobs=[_logprobs(choice) for _, choice in pairs],
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "batch prompt"], completion_tokens: Int[Array, "batch length"]
    ) -> Float[Array, "batch length"]:
        """Returns the log-probability (float32) of each answer's tokens, 0 for padding.

        Raises:
            ValueError: the temperature is not 1, because the engine scores given tokens at temperature 1 only.
        """
        if self._config is not None and self._config.temperature != 1.0:
            raise ValueError(
                f"log-probabilities at temperature {self._config.temperature} are not available: use temperature=1.0 "
                "or num_iterations=1"
            )
        answers = np.asarray(completion_tokens)
        lengths = [int(np.max(np.flatnonzero(row != self.pad_id()), initial=-1)) + 1 for row in answers]
        before = [row[row != self.pad_id()].tolist() for row in np.asarray(prompt_tokens)]
        whole = [
            {"prompt_token_ids": [*prompt, *row[:length].tolist()]}
            for prompt, row, length in zip(before, answers, lengths, strict=True)
        ]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate(whole, params, use_tqdm=False)
        found = np.zeros(answers.shape, np.float32)
        for row, prompt, output, length in zip(found, before, outputs, lengths, strict=True):
            tables = (output.prompt_logprobs or [])[len(prompt) :]
            ids = output.prompt_token_ids[len(prompt) :]
            row[:length] = [table[token].logprob for table, token in zip(tables, ids, strict=True) if table]
        return jax.numpy.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the engine's weights by those of a `TunixActor`.

        Raises:
            RequestError: the weights do not fit the engine's model. Nothing has changed.
            ValueError: only LoRA parameters are given.
        """
        if filter_types and nnx.LoRAParam in filter_types:
            raise ValueError("nnx.LoRAParam is not supported: TunixRollout receives all weights of a TunixActor")
        flat = dict(nnx.to_flat_state(params))
        # Tunix forbids transfers while it synchronizes on CPU, but the digest of the weights is read on the host.
        with jax.transfer_guard("allow"):
            self._llm.update_weights({".".join(map(str, path[1:])): leaf.get_value() for path, leaf in flat.items()})

    def pad_id(self) -> int:
        """The id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id of the token that ends a sequence."""
        return self._tokenizer.eos_id()

    def model(self) -> HybridModel:
        """The engine's model. Its weights are not the actor's, so Tunix sends it the actor's after each step."""
        return self._llm.model

    def _params(self, config: RolloutConfig, count: int) -> SamplingParams:
        seed = self._seed
        if config.seed is not None:
            key = config.seed
            typed = isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
            seed = int(np.asarray(jax.random.key_data(key) if typed else key).reshape(-1)[-1])
        number = next(self._requests)
        return SamplingParams(
            n=count,
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=-1 if config.top_k is None else config.top_k,
            seed=None if seed is None else seed + number,
            stop_token_ids=config.eos_tokens,
            ignore_eos=config.eos_tokens is not None,
            logprobs=0,
        )

    def _padded(self, prompts: Sequence[list[int]], width: int) -> np.ndarray:
        longest = max(map(len, prompts))
        if longest > width:
            raise ValueError(f"a prompt has {longest} tokens, but max_prompt_length is {width}")
        rows = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, ids in zip(rows, prompts, strict=True):
            row[width - len(ids) :] = ids
        return rows


def _logprobs(choice: CompletionOutput) -> np.ndarray:
    tables = choice.logprobs or []
    return np.array([table[token].logprob for table, token in zip(tables, choice.token_ids, strict=True)], np.float32)
