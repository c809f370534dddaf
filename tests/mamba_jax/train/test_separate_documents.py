"""`data.separate_documents`: a packed sequence has the loss and the gradient of its documents alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import DraftSettings, OptimizerSettings
from mamba_jax.train.data import Batches, DocumentBounds, TokenStream
from mamba_jax.train.loop import initial_values, read_log, train
from mamba_jax.train.loss import training_loss, validation_sequences
from tests.support.models.tiny_configs import FOR_ENGINES
from tests.support.models.tiny_training import BATCH, CONFIG, LENGTH, NO_DRAFTS, settings

SIMPLE = OptimizerSettings(warmup_steps=0)
LENGTHS = (8, 16, 8, 16, 8, 8, 1, 16)
STREAM = TokenStream.of([np.random.default_rng(i).integers(0, 40, length) for i, length in enumerate(LENGTHS)])


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "first", "other"),
    [("MDC*", "joined", "joined"), ("FS*", "lightning", "selective"), ("DL", "kimi", "kimi")],
)
def test_a_packed_sequence_has_the_loss_of_its_documents(pattern, first, other):
    """One layer of each kind, of two models in the first one's."""
    one, two = FOR_ENGINES[first], FOR_ENGINES[other]
    recurrences = tuple(dict.fromkeys(one.recurrences + two.recurrences))
    config = dataclasses.replace(one, pattern=pattern, mtp_pattern="", recurrences=recurrences)
    values = {path: v * 4 if v.ndim > 1 else v for path, v in initial_values(config, 0).items()}
    loss = functools.partial(training_loss, config=config, drafts=NO_DRAFTS, dtype=jnp.float32)

    @functools.partial(jax.jit, static_argnames="bounds")
    def run(values, tokens, bounds=None):
        return jax.value_and_grad(lambda values: loss(values, tokens, bounds=bounds)[0])(values)

    batch = np.stack([STREAM.sequence(start, 33, separate=True) for start in (0, 32)])
    packed = run(values, batch, bounds=DocumentBounds.of(batch[None]))
    unbounded, _ = jax.jit(loss)(values, np.maximum(batch, ~batch))
    documents = [piece for row in batch for piece in np.split(row, np.flatnonzero(row < 0)) if len(piece) > 1]
    count = sum(len(piece) - 1 for piece in documents)
    alone = [run(values, np.maximum(piece, ~piece)[None]) for piece in documents]
    shares = [(len(piece) - 1) / count for piece in documents]
    expected = jax.tree.map(lambda *parts: sum(share * part for share, part in zip(shares, parts, strict=True)), *alone)
    assert abs(unbounded - expected[0]) > 1e-3  # the boundaries matter
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_first_tokens_are_marked():
    tokens = STREAM.sequence(3, 22, separate=True)
    assert np.flatnonzero(tokens < 0).tolist() == [5, 21]
    np.testing.assert_array_equal(np.maximum(tokens, ~tokens), STREAM.sequence(3, 22, separate=False))
    assert (STREAM.tokens >= 0).all()
    rows = Batches({"a": STREAM}, {"a": 1}, batch_size=4, length=20, seed=0, separate=True)[0]
    assert (rows < 0).any()
    assert (validation_sequences({"a": STREAM}, length=20, limit=3, separate=True) < 0).any()


def test_bounds_of_documents():
    marked = np.stack([STREAM.sequence(start, 33, separate=True) for start in (0, 32)])
    assert DocumentBounds.of(marked[:, None]) == DocumentBounds(4, 16)
    assert DocumentBounds.of(marked[None]) == DocumentBounds(8, 16)
    assert DocumentBounds.of(np.ones((1, 2, 9), np.int32)) is None
    # A document begins after the last input.
    assert DocumentBounds.of(np.array([[[1, 2, ~3]]], np.int32)) == DocumentBounds(1, 2)


@pytest.mark.full
def test_parts_of_a_batch_have_the_mean_and_the_gradient_of_the_whole(tmp_path):
    """Parts have different numbers of targets. On one device and on several."""
    documents = [np.random.default_rng(i).integers(0, 40) + np.arange(3 + i % 9) for i in range(200)]
    stream, runs = TokenStream.of([document % 40 for document in documents]), []
    data = Batches({"a": stream}, {"a": 1}, batch_size=BATCH, length=LENGTH + 1, seed=0, separate=True)
    targets = (data[0][:, 1:] >= 0).reshape(4, -1).sum(axis=1)
    assert len(set(targets.tolist())) > 1
    for name, accumulate, devices in (("one", 1, 1), ("parts", 4, 1), ("divided", 1, 4)):
        chosen = settings(optimizer=SIMPLE, drafts=NO_DRAFTS, steps=1, accumulate=accumulate)
        train(chosen, CONFIG, data, tmp_path / name, devices=jax.devices()[:devices])
        runs.append(read_log(tmp_path / name / "log.jsonl")[0])
    for run in runs[1:]:
        for figure in ("loss", "gradient_norm"):
            assert run[figure] == pytest.approx(runs[0][figure], rel=1e-5)


def test_drafts_of_separate_documents_are_refused():
    marked = STREAM.sequence(2, 33, separate=True)[None]
    values, bounds = initial_values(CONFIG, 0), DocumentBounds.of(marked[None])
    with pytest.raises(ModelConfigError, match=r"set drafts\.depth_weights"):
        training_loss(values, marked, config=CONFIG, drafts=DraftSettings(), dtype=jnp.float32, bounds=bounds)
