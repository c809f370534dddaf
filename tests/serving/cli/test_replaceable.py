"""A command with an option for a file to write leaves the user's other files alone."""

import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import TrainConfig
from mamba_jax.train.recipe import keep_recipe
from serving.cli.main import run
from serving.cli.replaceable import check_replaceable
from serving.config import ConfigError

USERS = "my notes\n", "\n", "[]", "[1]", "{}", '{"kl": 1}', '{"a": 1}\n{"b": 2}\n', '{"step": 1}\n', "\x00", "null", "5"


@pytest.mark.parametrize("content", USERS)
@pytest.mark.parametrize("command", ["eval --output", "check --json", "train-grpo --log"])
def test_no_file_of_the_user_is_written_to(command, content, tmp_path, capsys):
    file = tmp_path / "users"
    file.write_text(content)
    assert run([*command.split(), str(file)]) == 2
    assert f"is not a report of `mamba-jax {command.split()[0]}`; give another file" in capsys.readouterr().err
    assert file.read_text() == content


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="give another file"):
        check_replaceable("--json", tmp_path, "check", lambda _: True)


@pytest.mark.parametrize("content", ["", '{"step": 1}', '{"step": 1}\n{"step": 2}\n', '{\n "step": [{\n }]\n}'])
def test_own_files_are_replaced(content, tmp_path):
    file = tmp_path / "own"
    file.write_text(content)
    check_replaceable("--log", file, "train-grpo", lambda record: "step" in record)


@pytest.mark.parametrize("name", ["log.jsonl", "model", "notes.txt", "."])
def test_a_folder_of_the_user_becomes_no_run(name, tmp_path):
    folder = tmp_path / "users"
    if name == ".":
        folder.write_text("a file")
    else:
        folder.mkdir()
        (folder / name).write_text("my notes")
    with pytest.raises(ModelConfigError, match="neither empty nor the directory of a run"):
        keep_recipe(folder, TrainConfig())
    assert (folder if name == "." else folder / name).read_text().startswith(("a file", "my notes"))
