"""OpenAI's Batch file form: the server's own bodies, one a line, answered in order, resumed without repeating."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.cli.generation.batch_file import run_batch
from serving.cli.generation.batch_output import naming, write_line
from tests.serving.cli.test_cli import read_lines, write_lines
from tests.support.models.letter_tokens import TOO_BIG


@pytest.fixture(scope="module")
def llm(server):
    engine = server.other_engine()
    config = SimpleNamespace(max_num_seqs=8, data_parallel_size=1, model="demo")
    return SimpleNamespace(engine=engine, front=engine, config=config, tokenizer=engine.tokenizer)


def line(custom_id, url="/v1/chat/completions", method="POST", **body):
    if url.startswith("/v1/chat"):
        body = {"messages": [{"role": "user", "content": "Hello"}]} | body
    body = {"model": "demo", "temperature": 0, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def batch(llm, folder, lines):
    """Runs a batch, or goes on with its output in the folder: counts and answers."""
    source, target = write_lines(folder / "in.jsonl", *lines), folder / "out.jsonl"
    return run_batch(llm, source, target), read_lines(target)


def names(lines):
    return [each.get("custom_id", each.get("id")) for each in lines]


def test_a_batch(server, llm, tmp_path):
    lines = [
        line("chat", n=2),
        line("text", "/v1/completions", prompt="The state of", logprobs=1, echo=True),
        {"id": "own", "prompt": "The state of", "max_tokens": 4, "temperature": 0},
        line("ids", "/v1/completions", prompt=[5, 6, 7]),
        line("wrong", temperature=-1),
        line("elsewhere", "/v1/embeddings", input="x"),
        line("fetched", method="GET"),
        line("several", "/v1/completions", prompt=["a", "b"]),
        line("long", "/v1/completions", prompt=[5] * 600),
        line("form", structured_outputs={"regex": "[0-9]{3}"}),
        line("complex", structured_outputs={"grammar": 'start: "abc" ' + TOO_BIG}),
        {"id": "own chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0},
        {"id": "own both", "messages": [], "prompt": "x"},
        {"id": "own complex", "prompt": "x", "structured_outputs": {"grammar": 'start: "abc" ' + TOO_BIG}},
    ]
    counts, found = batch(llm, tmp_path, lines)
    assert (counts.done, counts.failed) == (14, 8)
    assert names(found) == names(lines)
    chat, text, own, ids, wrong, *_, long, form, complex, own_chat, own_both, own_complex = found
    assert complex["error"]["message"].startswith("structured outputs: ")
    assert own_complex["error"].startswith("structured outputs: ")
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    asked = server.http.post("/v1/chat/completions", json=lines[0]["body"]).json()
    assert [c["message"] for c in body["choices"]] == [c["message"] for c in asked["choices"]]
    asked = server.http.post("/v1/completions", json=lines[1]["body"]).json()
    assert text["response"]["body"]["choices"][0]["text"] == asked["choices"][0]["text"]
    assert text["response"]["body"]["choices"][0]["text"] == "The state of" + own["text"]
    assert own_chat["text"] == body["choices"][0]["message"]["content"]
    assert "give exactly one of 'prompt', 'prompt_token_ids' and 'messages'" in own_both["error"]
    assert ids["response"]["body"]["usage"]["prompt_tokens"] == 3
    assert wrong["response"] is None
    assert "temperature" in wrong["error"]["message"]
    assert "at most 511" in long["error"]["message"]
    assert form["response"]["body"]["choices"][0]["message"]["content"].isdecimal()
    llm.engine.loop.scheduler.check(idle=not llm.engine.loop.busy)


def test_bad_lines_are_errors_of_their_own(server, llm, tmp_path):
    """Whatever is in a line; and a second run finds every answer there."""
    lines = [
        {"id": "\ud800", "prompt": "x"},
        {"id": "half", "prompt": "\udfff"},
        {"id": ["a", "list"], "prompt": {"not": "a text"}},
        line("template", chat_template_kwargs={"chat_template": 5}),
        line("variables", chat_template_kwargs=[1]),
        line("\ud800"),
        line("messages", messages=[{"role": "user", "content": "\ud83d"}]),
        line("nothing", "/v1/completions"),
        {"custom_id": 5, "body": None, "url": "/v1/completions"},
        {"custom_id": "no url", "body": {}, "url": {}},
        {"id": "good", "prompt": "The state of", "max_tokens": 2},
    ]
    counts, found = batch(llm, tmp_path, lines)
    assert (counts.done, counts.failed) == (len(lines), len(lines) - 1)
    assert names(found) == names(lines)
    assert all(each["error"] for each in found[:-1])
    assert found[-1]["text"]
    texts = (target := tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    target.write_text(texts[4] + texts[1] + texts[2][:20])  # a run that a crash has cut off
    counts, found = batch(llm, tmp_path, lines)
    assert (counts.done, counts.skipped) == (len(lines) - 2, 2)
    assert names(found) == names(lines)


def test_a_line_that_breaks_the_program_is_one_error(llm, tmp_path, monkeypatch):
    encode, calls = llm.tokenizer.apply_chat_template, []

    def sometimes(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:  # the second line: each is rendered with and without the beginning of the answer
            raise KeyError("a bug")
        return encode(*arguments, **options)

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", sometimes)
    counts, found = batch(llm, tmp_path, [line(f"c{i}") for i in range(3)])
    assert (counts.done, counts.failed) == (3, 1)
    assert found[1]["error"]["message"].startswith("internal error")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_names_the_file(tmp_path):
    target = tmp_path / "out.jsonl"
    with pytest.raises(OSError, match="No space left on device") as caught:
        with naming(target), Path("/dev/full").open("ab", buffering=0) as out:
            write_line(out, {"id": 1})
    assert caught.value.filename == str(target)
