"""The pair of snapshots and replay: what it says is moved, and that it runs."""

import json

import jax.numpy as jnp
import pytest

from benchmarks.replay import main, state_bytes
from mamba_jax.store import StoreShape
from tests.support.tiny_configs import FOR_ENGINES

SHAPE = StoreShape.of(FOR_ENGINES["nemotronh"])


def test_bytes_of_a_step():
    slot = SHAPE.bytes_per_slot(jnp.float32)
    assert state_bytes(SHAPE, jnp.float32, rows=4, drafts=3, interval=1) == 4 * 5 * slot
    short, long = (state_bytes(SHAPE, jnp.float32, rows=4, drafts=3, interval=each) for each in (16, 64))
    assert short > 4 * slot * (1 + 4 / 16)  # and tails
    # A longer interval writes fewer states, and reads more of the tail.
    assert short - 4 * slot * 4 / 16 < long - 4 * slot * 4 / 64


@pytest.mark.slow
def test_it_runs(capsys):
    main(["demo", "--rows", "2", "--drafts", "1", "--turns", "2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["metric"] for line in lines] == ["environment", "snapshots", "replay"]
    assert lines[2]["state_mb"] < lines[1]["state_mb"]
