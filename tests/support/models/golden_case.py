"""A golden fixture, our model loaded from it, and what that model says about the prompts as whole sequences."""

import dataclasses
import functools
import random
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import load_model
from mamba_jax.adapters import Adapters
from mamba_jax.config import HybridConfig
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from tests.support.stored_jit import StoredJit

FIXTURES = Path(__file__).parents[2] / "golden"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/goldens.npz"))

TO_HUGGING_FACE = 2e-4
"""How far log-probabilities may be from Hugging Face's."""
TO_OURSELVES = 1e-4
"""How far those of two of our own ways to compute them may be from each other."""
CLEAR_GAP = 1e-3
"""A greedy token that beats the runner-up by less may be another one here."""
FLAGS = {
    "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "state_block_size": 32,
    "tile_size": 32, "page_size": 16, "compilation_cache": False,
}  # fmt: skip
"""Of engines that serve a fixture."""


class Case:
    """One fixture. `prompts` are its six prompts, of 1 to 3 * chunk + 5 tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = FIXTURES / name
        with np.load(self.directory / "goldens.npz") as goldens:
            self._goldens = dict(goldens)
        count = sum(key.startswith("tokens_") for key in self._goldens)
        self.prompts = [self._goldens[f"tokens_{i}"].astype(np.int32) for i in range(count)]

    @cached_property
    def model(self) -> HybridModel:
        """Our model, in float32."""
        return self.load("float32")

    def load(self, dtype: str) -> HybridModel:
        """Our model in a dtype."""
        return load_model(self.directory, dtype=dtype, progress=False)

    @cached_property
    def full(self) -> list[np.ndarray]:
        """For each prompt our log-probabilities [length, vocab] after each token, by one call over whole sequences."""
        return full_log_probs(self.model, self.prompts)

    def expected(self, prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions [n], vocabulary ids [n, m] and Hugging Face's log-probabilities [n, m] of a prompt."""
        return self._entries(*(f"{key}_{prompt}" for key in ("positions", "ids", "logprobs")))

    @property
    def expected_drafts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same of the draft layer's pairs, of the fifth prompt."""
        return self._entries("draft_positions", "draft_ids", "draft_logprobs")

    def _entries(self, positions: str, ids: str, values: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._goldens[positions].astype(int), self._goldens[ids].astype(int), self._goldens[values]

    def greedy(self, prompt: int) -> tuple[list[int], list[float]]:
        """Hugging Face's greedy continuation of a prompt, and by how much each token beats the runner-up."""
        return self._goldens[f"greedy_{prompt}"].tolist(), self._goldens[f"gaps_{prompt}"].tolist()


def full_log_probs(model: HybridModel, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities after each token of each prompt, all prompts in one padded batch."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    out = np.asarray(_log_probs(model, tokens, lengths))
    return [row[:length] for row, length in zip(out, lengths, strict=True)]


@functools.cache
def whole_log_probs(config: HybridConfig) -> StoredJit:
    """A function (parameters by path, tokens [rows, length], lengths) -> log-probabilities after each token."""
    return StoredJit(lambda values, *rows: jax.nn.log_softmax(HybridModel.from_parameters(config, values)(*rows)))


def _log_probs(model: HybridModel, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """By a program that is stored as those of steps are: only the first run on a machine traces it."""
    values = {path: leaf.get_value() for path, leaf in parameters(model).items()}
    return whole_log_probs(model.config)(values, tokens, lengths)


def log_probs(model: HybridModel, tokens: list[int], longest: int = 256) -> np.ndarray:
    """Log-probabilities [length, vocab] after each token, in float64; all lengths up to `longest` share a program."""
    row = np.zeros((1, longest), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_log_probs(model, row, np.array([len(tokens)])))[0, : len(tokens)].astype(np.float64)


def draft_log_probs(model: HybridModel, tokens: np.ndarray) -> np.ndarray:
    """The draft layer's log-probabilities [length - 1, vocab] after each pair (hidden state of i, token i + 1)."""

    @StoredJit
    def run(model, tokens):
        layout = SequenceLayout.of(1, len(tokens))
        hidden, _ = model.run(tokens, layout, None)
        # Entry i + 1 is of the pair (hidden state i, token i + 1); there is no pair at index 0.
        out, _ = model.draft(tokens, jnp.roll(hidden, 1, axis=0), layout, None)
        return jax.nn.log_softmax(model.draft_logits(out))[1:]

    return np.asarray(run(model, tokens))


def adapted_logits(model: HybridModel, stacks: Adapters, tokens: np.ndarray, entries: np.ndarray) -> Any:
    """A function from the arrays of adapters to logits of rows of tokens, whose adapters have these entries."""

    @StoredJit
    def run(layered, tokens, adapter):
        layout = dataclasses.replace(SequenceLayout.of(*tokens.shape), adapter=adapter)
        hidden, _ = layered.run(tokens.reshape(-1), layout, None)
        return layered.logits(hidden, adapter).reshape(*tokens.shape, -1)

    def logits(arrays):
        stacks.attach(layered := nnx.clone(model), arrays)
        return np.asarray(run(layered, tokens, np.repeat(entries, tokens.shape[1])))

    return logits


def chosen_logprobs(choice: Any) -> list[float]:
    """The log-probability of each token of an output's choice."""
    return [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]


_float32_model = functools.lru_cache(4)(functools.partial(load_model, dtype="float32", progress=False))


def assert_greedy(outputs: Iterable[Any], directory: Path, *, atol: float = 1e-3) -> None:
    """Outputs are what a model itself, over whole sequences, would choose, with its log-probabilities."""
    model = _float32_model(directory)
    for output in outputs:
        before, choice = len(output.prompt_token_ids), output.outputs[0]
        expected = log_probs(model, [*output.prompt_token_ids, *choice.token_ids])[before - 1 : -1]
        own = expected[np.arange(len(choice.token_ids)), choice.token_ids]
        assert (expected.max(axis=1) - own < 1e-3).all(), (choice.token_ids, expected.argmax(axis=1))
        np.testing.assert_allclose(chosen_logprobs(choice), own, atol=atol)


def shared_block() -> list[list[int]]:
    """Prompts of 41 and 47 tokens, which share a block of 36, and the first one again."""
    rng = random.Random(2)
    shared = [rng.randrange(3, 250) for _ in range(12)] * 3
    first, second = (shared + [rng.randrange(3, 250) for _ in range(count)] for count in (5, 11))
    return [first, second, first]


def said(output: Any) -> tuple[list[int], np.ndarray]:
    """The tokens of an output's first choice, and their log-probabilities."""
    return list(output.outputs[0].token_ids), np.array(chosen_logprobs(output.outputs[0]))


def same(one: tuple[list[int], np.ndarray], other: tuple[list[int], np.ndarray]) -> bool:
    """Whether two outputs, as `said` returns them, are equal up to rounding."""
    return one[0] == other[0] and np.allclose(one[1], other[1], atol=TO_HUGGING_FACE)
