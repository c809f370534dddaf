"""Training: the loss falls, a run that was cut short goes on as if it had not been, devices share a batch."""

import dataclasses
import functools
import os
import signal
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from mamba_jax.config import ModelConfigError
from mamba_jax.train import loop
from mamba_jax.train.config import DataSettings, DraftSettings, OptimizerSettings
from mamba_jax.train.optimizer import make_optimizer
from mamba_jax.train.recipe import CHECKPOINTS, open_checkpoints
from tests.support.models.tiny_configs import FOR_ENGINES
from tests.support.models.tiny_training import CONFIG, LENGTH, batches, settings

ONE = jax.devices()[:1]


def run(directory, *, data=None, devices=ONE, **changes):
    return loop.train(settings(**changes), CONFIG, data or batches(), directory, devices=devices)


def losses(directory):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in loop.read_log(directory / loop.LOG)]


@dataclasses.dataclass
class Disturbed:
    """Batches in whose step number `at` something happens."""

    at: int
    happen: Callable[[], object]

    def __getitem__(self, step):
        if step == self.at:
            self.happen()
        return batches()[step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return run(directory), losses(directory)


def test_the_losses_fall(whole):
    done, records = whole
    assert done.finished
    assert done.steps == 12
    for name in ("loss", "draft_loss_1", "draft_loss_2"):
        assert records[-1][name] < 0.8 * records[0][name]
    assert records[0]["loss"] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.05)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1]["tokens"] == 12 * settings().batch_size * LENGTH


def test_an_interrupted_run_goes_on_bit_for_bit(whole, tmp_path):
    cut = run(tmp_path, data=Disturbed(6, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert not cut.finished
    assert cut.steps == 7
    done = run(tmp_path)
    assert done.finished
    assert losses(tmp_path) == whole[1]
    for path, value in whole[0].values.items():
        assert (np.asarray(done.values[path]) == np.asarray(value)).all(), path


@pytest.mark.full
def test_a_killed_run_goes_back_to_its_last_state(whole, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, data=Disturbed(8, lambda: 1 / 0), save_every=5)
    assert len(losses(tmp_path)) == 8
    with (tmp_path / loop.LOG).open("a") as log:
        log.write('{"step": 9, "lo')
    run(tmp_path, save_every=5)
    assert losses(tmp_path) == whole[1]


DRAFTS = DraftSettings(depth_weights=(0.3,))
OVER_LATENTS = dataclasses.replace(FOR_ENGINES["kimi"], mtp_pattern="L-")


@pytest.mark.parametrize(
    ("config", "changes", "devices", "message"),
    [
        (CONFIG, {"steps": 30, "optimizer": OptimizerSettings()}, 1, r"optimizer.warmup_steps is 100 and optimizer"),
        (CONFIG, {"batch_size": 6}, 4, "is 6: it cannot be divided among 4 devices"),
        (CONFIG, {"drafts": DRAFTS, "data": DataSettings(separate_documents=True)}, 1, "needs joined documents"),
        (dataclasses.replace(CONFIG, logits_soft_cap=7.0), {}, 1, "not supported with logits_soft_cap 7.0"),
        (OVER_LATENTS, {"drafts": DRAFTS}, 1, "a draft layer with attention over latents"),
    ],
)
def test_a_run_that_cannot_start_is_refused_before_its_data_is_prepared(config, changes, devices, message):
    with pytest.raises(ModelConfigError, match=message):
        loop.check_run(settings(**changes), config, devices)


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path):
    data = [np.full((8, LENGTH + 1), CONFIG.vocab_size, np.int32)]
    with pytest.raises(ModelConfigError, match=f"the token {CONFIG.vocab_size}, but the model a vocabulary of"):
        run(tmp_path, data=data)


def test_weight_decay_shrinks_matrices_only():
    optimizer = make_optimizer(OptimizerSettings(warmup_steps=0, weight_decay=0.5, learning_rate=0.1), 12)
    values = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    update, _ = optimizer.update({name: 0 * value for name, value in values.items()}, optimizer.init(values), values)
    assert {name for name, change in update.items() if np.any(change)} == {"layers.0.in_proj.weight"}


SHAPES = {"layers.0.in_proj.weight": (3, 2), "layers.0.conv_weight": (3, 4), "norm.weight": (2,)}
"""Of a product, a convolution and a norm."""


@pytest.mark.full
def test_divided_weights_need_less_memory_and_give_the_same_losses(whole, tmp_path):
    def on_one(arrays):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))

    four = jax.devices()[:4]
    values = loop.initial_values(CONFIG, 0)
    mesh = Mesh(np.array(four), ("batch",))
    optimizer = make_optimizer(settings().optimizer, 12)
    states = {
        divided: loop.initial_state(values, optimizer, functools.partial(loop._placement, mesh, divided=divided))
        for divided in (False, True)
    }
    assert on_one(states[True].optimizer) < 0.4 * on_one(states[False].optimizer)
    done = run(tmp_path, devices=four, steps=3, shard_weights=True)
    assert on_one(done.values) < 0.4 * on_one(values)
    together = [record["loss"] for record in losses(tmp_path)]
    np.testing.assert_allclose(together[:2], [record["loss"] for record in whole[1][:2]], rtol=1e-4)


@pytest.mark.full
def test_bfloat16_products(whole, tmp_path):
    done = run(tmp_path, steps=3, compute_dtype="bfloat16")
    assert all(value.dtype == np.float32 for value in done.values.values())
    np.testing.assert_allclose(losses(tmp_path)[0]["loss"], whole[1][0]["loss"], rtol=1e-2)


def test_what_is_not_trained_stays(tmp_path):
    start = loop.initial_values(CONFIG, 5)
    done = loop.train(
        settings(steps=2, optimizer=OptimizerSettings(learning_rate=0.01, warmup_steps=0)), CONFIG, batches(),
        tmp_path, values=start, trained=lambda path: path.startswith("mtp."), model_weight=0.0, devices=ONE,
    )  # fmt: skip
    for path, value in done.values.items():
        same = (np.asarray(value) == np.asarray(start[path])).all()
        assert same != path.startswith("mtp."), path


@pytest.mark.full
def test_a_run_of_another_model_is_refused(whole, tmp_path):
    run(tmp_path, steps=2)
    wider = dataclasses.replace(CONFIG, hidden_size=CONFIG.hidden_size, vocab_size=CONFIG.vocab_size + 1)
    with pytest.raises(ModelConfigError, match="does not fit this configuration"):
        loop.train(settings(steps=4), wider, batches(), tmp_path, devices=ONE)


def test_a_loss_that_is_not_finite_stops_at_the_last_good_state(tmp_path):
    """The first step is finite and makes weights of 1e38; the second is not, and the host looks after the fourth."""
    optimizer = OptimizerSettings(learning_rate=1e38, warmup_steps=0, weight_decay=0.0)
    with pytest.raises(loop.TrainingDiverged, match="not finite at step 2; the state after 1 steps is saved"):
        run(tmp_path, log_every=4, optimizer=optimizer)
    with open_checkpoints(tmp_path / CHECKPOINTS) as saved:
        assert saved.latest_step() == 1
    assert losses(tmp_path) == []
    one = run(tmp_path, steps=1, optimizer=optimizer)
    assert all(np.isfinite(np.asarray(value)).all() for value in one.values.values())


def test_quantized_weights_are_refused(tmp_path):
    values = {"blocks.0.mixer.out_proj.weight.values": jax.numpy.ones((2, 2), "int8")}
    with pytest.raises(ModelConfigError, match=r"1 weights are quantized \(blocks.0.mixer.out_proj.weight, ...\)"):
        loop.train(settings(), CONFIG, batches(), tmp_path, values=values)
