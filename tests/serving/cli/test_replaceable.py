"""A command with an option for a file to write leaves the user's other files alone."""

import os
from pathlib import Path

import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import TrainConfig
from mamba_jax.train.corpus import SAMPLE_PROBLEMS, SAMPLE_TEXT, read_documents
from mamba_jax.train.recipe import keep_recipe
from serving.cli.main import run
from serving.cli.options import check_replaceable

USERS = "my notes\n", "\n", "[]", "[1]", "{}", '{"kl": 1}', '{"a": 1}\n{"b": 2}\n', '{"step": 1}\n', "\x00", "null", "5"


@pytest.mark.parametrize("content", USERS)
@pytest.mark.parametrize("command", ["eval --output", "check --json", "train-grpo --log"])
def test_no_file_of_the_user_is_written_to(command, content, tmp_path, capsys):
    file = tmp_path / "users"
    file.write_text(content)
    assert run([*command.split(), str(file)]) == 2
    assert f"is not a report of `mamba-jax {command.split()[0]}`; give another file" in capsys.readouterr().err
    assert file.read_text() == content


@pytest.mark.parametrize(
    "command", ["generate x --config", "generate x --model demo --chat-template", "train --output run --config"]
)
def test_pipes_and_devices_are_not_read(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.yaml")
    Path("device.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "device.yaml"):
        assert run([*command.split(), name]) == 2
        assert f"{name}: cannot be read (not a regular file)" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"notes\n", b"\n[1]\n", b'{"a": 1}\n', b'{"text": 5}', b"\xff\xfe\n", b"[" * 9999])
@pytest.mark.parametrize(
    "command", ["train-grpo --problems", "train-lora --model demo --output out --data", "eval --against demo --text"]
)
def test_lines_that_are_no_documents_are_named(command, content, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.jsonl").write_bytes(content)
    assert run([*command.split(), "notes.jsonl"]) == 2
    assert "notes.jsonl, line " in (said := capsys.readouterr().err)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "line", "missing"),
    [
        ("train-grpo --problems notes.jsonl", '{"text": "a"}', "question"),
        ("train-lora --model demo --output out --data notes.jsonl", '{"question": "1+1?", "anwser": "2"}', "answer"),
        ("eval --against demo --text notes.jsonl", '{"question": "1+1?", "answer": null}', "answer"),
        ("eval --data .", '{"question": "1+1?", "answer": "#### 2"}', "result"),
    ],
)
def test_a_document_that_lacks_a_field_is_named(command, line, missing, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notes.jsonl", SAMPLE_PROBLEMS):
        Path(name).write_text(f"\n{line}\n")
    Path(SAMPLE_TEXT).write_text('{"text": "a"}\n')
    assert run(command.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ".jsonl, line 2: " in said
    assert f"'{missing}' is missing or not a text" in said


def test_a_missing_file_of_documents_has_no_line(tmp_path):
    with pytest.raises(ModelConfigError, match=r"none.jsonl: cannot be read \(No such file or directory\)"):
        list(read_documents(tmp_path / "none.jsonl"))


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
