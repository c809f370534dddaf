"""Sequences: in the shares that were asked for, each once before any comes twice, the same for the same step."""

import numpy as np
import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.train.data import Batches, TokenStream, hold_out, read_streams, save_streams
from mamba_jax.train.loss import validation_sequences

LENGTH = 10
DOCUMENTS = {"long": [range(0, 1000)], "short": [range(2000 + 7 * i, 2007 + 7 * i) for i in range(40)]}
STREAMS = {"long": TokenStream.of(DOCUMENTS["long"]), "short": TokenStream.of(DOCUMENTS["short"], aligned=True)}


def make(shares, seed=0, batch_size=6):
    return Batches(STREAMS, shares, batch_size=batch_size, length=LENGTH, seed=seed)


def test_a_step_is_a_function_of_its_number():
    data = make({"long": 1, "short": 1})
    later = [data[step] for step in (50, 3, 17)]
    again = make({"long": 1, "short": 1})
    for step, batch in zip((50, 3, 17), later, strict=True):
        assert (again[step] == batch).all()
    assert not (make({"long": 1, "short": 1}, seed=1)[3] == later[1]).all()


def test_shares():
    data = make({"long": 1, "short": 2})
    rows = np.concatenate([data[step] for step in range(20)])  # one block
    assert (rows[:, 0] >= 2000).mean() == pytest.approx(2 / 3)
    assert (np.diff(rows, axis=1) == 1).all()


def test_each_window_comes_once_before_any_comes_twice():
    data = make({"long": 1}, batch_size=1)
    starts = [int(data[step][0, 0]) for step in range(99)]
    assert len(set(starts)) == 99
    assert len({start % LENGTH for start in starts}) == 1


def test_aligned_sequences_begin_with_a_document():
    data = make({"short": 1})
    assert all(((data[step][:, 0] - 2000) % 7 == 0).all() for step in range(10))


def test_kept_streams(tmp_path):
    save_streams(tmp_path / "tokens.npz", STREAMS)
    for name, stream in read_streams(tmp_path / "tokens.npz").items():
        assert (stream.tokens == STREAMS[name].tokens).all()
        assert (stream.starts == STREAMS[name].starts).all()
        assert stream.aligned == STREAMS[name].aligned


def test_what_cannot_be():
    with pytest.raises(ModelConfigError, match=r"data\.mixture has 'other'; the corpus has long, short"):
        make({"other": 1})
    with pytest.raises(ModelConfigError, match="the data has no source"):
        make({})
    with pytest.raises(ModelConfigError, match="'few' has 5 tokens"):
        Batches({"few": TokenStream.of([range(5)])}, {"few": 1}, batch_size=1, length=LENGTH, seed=0)


def test_documents_are_held_out_and_never_trained_on():
    streams = {"one": TokenStream.of([[i] * 10 for i in range(10)], aligned=True)}
    training, held = hold_out(streams, 0.2)
    assert set(training["one"].tokens) | set(held["one"].tokens) == set(range(10))
    assert not set(training["one"].tokens) & set(held["one"].tokens)
    assert len(held["one"].starts) == 2
    assert held["one"].aligned
    sequences = validation_sequences(training, length=8, limit=3)
    assert sequences.shape == (3, 8)
    assert len({tuple(sequence) for sequence in sequences}) == 3
