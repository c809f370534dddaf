"""`train --model`: a checkpoint is fine-tuned with a validation loss and saved in its own form."""

import json

import numpy as np
import pytest

import mamba_jax
from checkpoints.random import write_random
from checkpoints.resolve import DEMO_DIRECTORY
from serving.cli.main import run
from tests.support.models.tiny_configs import TRAINABLE

pytestmark = pytest.mark.full

SETTINGS = ["steps=6", "batch_size=8", "sequence_length=16", "log_every=3", "validate_every=2"]
SETTINGS += ["optimizer.learning_rate=0.01", "optimizer.warmup_steps=0", "data.held_out=0.25"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fine_tune")
    tokenizer = (DEMO_DIRECTORY / "tokenizer.json").read_text()
    write_random(directory / "base", TRAINABLE | {"vocab_size": 4096}, dtype="bfloat16", tokenizer=tokenizer)
    texts = [{"id": str(i), "text": "one two three four five six seven " * 8} for i in range(16)]
    (directory / "text.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    return directory


def fine_tune(folder, output, *more, settings=()):
    line = ["train", "--model", str(folder / "base"), "--corpus", str(folder / "text.jsonl")]
    changes = [part for one in (*SETTINGS, *settings) for part in ("--set", one)]
    return run([*line, "--output", str(folder / output), *more, *changes])


@pytest.fixture(scope="module")
def tuned(folder):
    assert fine_tune(folder, "run") == 0
    return folder / "run"


def test_a_checkpoint_is_fine_tuned_and_saved_in_its_own_form(folder, tuned):
    records = [json.loads(line) for line in (tuned / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 3, 4, 6]
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    config = json.loads((tuned / "model/config.json").read_text())
    assert config == json.loads((folder / "base/config.json").read_text())
    assert (tuned / "model/tokenizer.json").read_bytes() == (folder / "base/tokenizer.json").read_bytes()
    before, after = (
        {path: leaf.get_value() for path, leaf in mamba_jax.parameters(mamba_jax.load(str(ref))).items()}
        for ref in (folder / "base", tuned / "model")
    )
    unchanged = {path for path in before if (np.asarray(before[path]) == np.asarray(after[path])).all()}
    assert any(path.startswith("mtp.") for path in unchanged)
    assert all(path.startswith("mtp.") for path in unchanged), unchanged


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--validation", "none"], "none: no validation data"),
        (["--set", "data.held_out=0.01"], "the validation data has no sequence of 17 tokens"),
        (["--set", "data.held_out=1"], "data.held_out is 1: input should be less than 1"),
        (["--set", "model.vocab_size=8"], "remove `model` from the config file"),
        (["--model", "none"], "no such model"),
    ],
)
def test_wrong_settings_are_one_line(folder, tmp_path, capsys, changes, message):
    assert fine_tune(folder, tmp_path, *changes[:2], settings=changes[1:] if changes[0] == "--set" else ()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
