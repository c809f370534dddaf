"""The output file of a batch: how it is recognized, what is answered again, and that users' files stay as they are."""

import json

import pytest

from serving.cli.generation.batch_file import read_lines, run_batch
from serving.cli.generation.batch_output import DIGEST, line_key, opened, prepare, read_answers, sort_like, write_line
from serving.cli.main import run
from serving.config import ConfigError

ANSWER = {"text": "t", "token_ids": [1], "finish_reason": "stop", "usage": {}}


def key(name, text=b"text"):
    return line_key(name, text, {})


def answer(name, text=b"text", **fields):
    fields = fields or ANSWER
    return json.dumps({"id": name, **fields, DIGEST: key(name, text).digest}) + "\n"


def ids(path):
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "content",
    [
        "my notes\n", "my notes", "my\nnotes\n", "[1]\n", "null\n", "\n", "\x00\x01\n", "[" * 100_000 + "\n",
        '{"title": "a JSON file of one line"}\n', '{"id": 5, "title": "with an id"}\n',
        '{"id": 5, "title": "with an id and no newline"}', '{"id": 5, "error": {"code": 5}}\n',
        '{"id": "a", "prompt": "the input of a batch", "max_tokens": 5}\n',
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n',
        json.dumps({"id": "a", "without": "a digest"} | ANSWER) + "\n",
        answer("a") + "my notes\n", answer("a") + "my notes", answer("a") + "\n" + answer("b"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_batch_output_is_not_touched(content, tmp_path, capfd):
    path, source = tmp_path / "notes.txt", tmp_path / "in.jsonl"
    path.write_text(content)
    source.write_text('{"id": "a", "prompt": "x"}\n')
    for words in ([], ["--overwrite"], ["--retry-failed"]):
        assert run(["generate", "--input", str(source), "--output", str(path), *words]) == 2
        assert "is not the output of a batch; the file was not changed" in capfd.readouterr().err
    assert path.read_text() == content
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "notes.txt"]


@pytest.mark.parametrize("length", [1, 5, 8, 30, len(answer("b")) - 1])
def test_only_a_last_line_without_a_newline_is_cut(length, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(answer("a") + answer("b")[:length])
    assert prepare(path, [key("a"), key("b")]) == {key("a"): 1}
    assert path.read_text() == answer("a")


def test_failed_lines_are_answered_again_on_request(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = answer("a") + answer("b", error="too long") + answer("c")
    for options, left in (({}, "abc"), ({"retry_failed": True}, "ac"), ({"overwrite": True}, "")):
        path.write_text(lines)
        assert prepare(path, map(key, "abc"), **options) == dict.fromkeys(map(key, left), 1)
        assert ids(path) == list(left)


def test_answers_to_changed_lines_are_not_kept_in_silence(tmp_path):
    path = tmp_path / "out.jsonl"
    lines = answer("a") + answer("b", error="too long")
    path.write_text(lines)
    with pytest.raises(ConfigError, match=r'the answer to line "a" is to another line'):
        prepare(path, [key("a", b"changed"), key("b")])
    assert path.read_text() == lines
    assert prepare(path, [key("a"), key("b", b"mended")]) == {key("a"): 1}
    assert ids(path) == ["a"]
    assert line_key("a", b"text", {"temperature": 1}) != key("a")


def test_answers_to_lines_with_equal_ids(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(answer("b", b"2") + answer("a") + answer("b", b"1") + answer("elsewhere"))
    order = [key("a"), key("b", b"1"), key("b", b"2"), key("c")]
    assert [prepare(path, order)[each] for each in order] == [1, 1, 1, 0]
    assert sort_like(path, order) == 0
    assert [each.key for each in read_answers(path)] == [*order[:3], key("elsewhere")]


def test_a_link_and_the_mode_of_a_file_stay(tmp_path):
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    path.write_text(answer("b") + answer("a", error="x"))
    path.chmod(0o640)
    link.symlink_to(path)
    assert sort_like(link, [key("a"), key("b")]) == 1
    assert link.is_symlink()
    assert (ids(path), path.stat().st_mode & 0o777) == (["a", "b"], 0o640)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'\xef\xbb\xbf{"id": "a"}\r\n{"id": "b"}', ["a", "b"]),
        (b'{"id": "a"}\n\r\n \n{"id": "a"}\n', ["a", "a"]),
        (b'{"id": "a", "prompt": "\xe9"}\n\x00\n{"id": \r\n[]\n', ["line-1", "line-2", "line-3", "line-4"]),
        ('{"id": "a"}\n'.encode("utf-16"), ["line-1", "line-2"]),
    ],
)
def test_lines_of_other_editors(content, found, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    lines = list(read_lines(source))
    assert [line.id for line in lines] == found
    assert [isinstance(line.fields, str) for line in lines] == [str(name).startswith("line-") for name in found]


def test_two_runs_do_not_write_to_one_output_although_it_is_replaced_while_it_is_prepared(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(answer("a", error="x") + answer("b"))
    with opened(path, lambda: prepare(path, [key("a"), key("b")], retry_failed=True)) as (out, answered):
        write_line(out, {"id": "a", **ANSWER})
        with pytest.raises(ConfigError, match="another run writes to it"), opened(path, dict):
            pass
    with opened(path, dict):
        pass
    assert answered == {key("b"): 1}
    assert ids(path) == ["b", "a"]


def test_no_output_is_created_without_an_input(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(FileNotFoundError):
        run_batch(None, tmp_path / "missing", path)
    assert not path.exists()
