"""`mamba-jax serve` and `mamba-jax chat`: settings from all places, mistakes in one line, a conversation."""

import contextlib
import io
import re
import socket
from unittest import mock

import httpx
import pytest
from rich.console import Console

from serving.api.http.settings import resolve_settings
from serving.cli.generation.generate import AnswerStats, _texts, converse, remote
from serving.cli.main import main, run
from serving.config import ConfigError
from tests.support.fleets.processes import Process, running
from tests.support.waiting import comes_true


def test_a_port_that_is_taken(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capfd.readouterr().err


def test_settings_come_from_everywhere(monkeypatch):
    monkeypatch.setenv("MAMBA_JAX_API_KEY", "from-the-environment")
    file = {"port": 9000, "max_num_seqs": 4, "served_model_name": "a-name", "host": "0.0.0.0"}
    settings, config = resolve_settings(dict(file), {"port": 9001, "host": None})
    assert (settings.port, settings.host, settings.served_model_name) == (9001, "0.0.0.0", ("a-name",))
    assert settings.api_key == ("from-the-environment",)
    assert config.max_num_seqs == 4
    assert config.warmup
    assert config.enable_structured_outputs
    settings, config = resolve_settings({"warmup": False}, {"api_key": ("own",)})
    assert settings.api_key == ("own",)
    assert settings.served_model_name == ("demo",)
    assert settings.host == "127.0.0.1"
    assert not config.warmup
    with pytest.raises(ConfigError, match="unknown setting 'prot'"):
        resolve_settings({"prot": 1}, {})


def said(answer, questions):
    console = Console(file=io.StringIO(), width=200)
    converse(console, answer, [], mock.Mock(side_effect=[*questions, EOFError]))
    return console.file.getvalue()


def test_a_conversation():
    seen = []

    def answer(messages, account):
        seen.append([dict(message) for message in messages])
        account.prompt_tokens, account.cached_tokens, account.completion_tokens = 10, 8, 2
        account.drafted, account.accepted = 4, 3
        yield from ("two ", "[b]words[/b]")

    text = said(answer, ["one", "", "/what", "two", "/reset", "three", "/exit", "never"])
    assert "two [b]words[/b]" in text
    assert "10 prompt tokens, 8 of them cached; 2 new; 3 of 4 drafts accepted" in text
    assert [len(messages) for messages in seen] == [1, 3, 1]
    assert seen[1][1] == {"role": "assistant", "content": "two [b]words[/b]"}


def test_a_failed_request_does_not_end_the_conversation():
    seen = []

    def answer(messages, account):
        seen.append([message["content"] for message in messages])
        if len(seen) == 1:
            raise ConfigError("http://127.0.0.1:1: connection \x1b[31mrefused")
        yield "fine"

    text = said(answer, ["one", "two"])
    assert "error: http://127.0.0.1:1: connection [31mrefused" in text
    assert "fine" in text
    assert seen == [["one"], ["two"]], "the question without an answer is dropped"


def test_a_refused_connection_and_bad_events_are_reported():
    assert said(remote("http://127.0.0.1:1", None, {}), ["one", "two"]).count("error: http://127.0.0.1:1") == 2
    for event in ("{", "[]", '{"choices": 5}', '{"choices": [{}]}', '{"error": 1}', '"x"'):
        with pytest.raises(ConfigError):
            list(_texts(iter([f"data: {event}"]), AnswerStats()))


def test_terminal_escapes_are_removed():
    def answer(messages, account):
        yield "a\x1b]0;title\x07b\x1b"
        yield "[2Jc\r\x9b31md\u202ee\tf\n"

    text = said(answer, ["one"])
    assert "a]0;titleb[2Jc31mde" in text
    assert not any(character in text for character in "\x1b\x07\r\x9b\u202e")


def test_a_conversation_with_a_server(server):
    answer = remote(server.url + "/v1", None, {"max_tokens": 6, "temperature": 0, "ignore_eos": True})
    account = AnswerStats()
    text = "".join(answer([{"role": "user", "content": "Hello there"}], account))
    assert text
    assert account.completion_tokens == 6
    again = AnswerStats()
    assert "".join(answer([{"role": "user", "content": "Hello there"}], again)) == text
    assert again.cached_tokens == again.prompt_tokens
    with pytest.raises(ConfigError, match="prompt has"):
        list(answer([{"role": "user", "content": "word " * 2000}], account))


def test_the_program_itself(tmp_path, capfd):
    """A process of its own, by a command line of vLLM: listens, answers, and ends when it is asked to."""
    config = tmp_path / "server.yaml"
    config.write_text("max-num-seqs: 2\nmax-model-len: 256\nmax-num-batched-tokens: 64\nno_such: 1\n")
    vllm = "--tensor-parallel-size 1 --trust-remote-code --enable-auto-tool-choice --tool-call-parser qwen3_coder"
    words = ["serve", "demo", "--no-warmup", *vllm.split(), "--config", str(config)]
    with pytest.raises(SystemExit, match=r"^2$"):
        main(words)
    assert "no_such" in capfd.readouterr().err
    config.write_text(config.read_text().replace("no_such: 1", "log_format: json"))
    with running(Process(*words, log_to=tmp_path)) as (server,):
        assert httpx.post(server.url + "/tokenize", json={"prompt": "x"}).json()["max_model_len"] == 256
        assert server.get("/v1/models")["data"][0]["id"] == "demo"
        server.process.terminate()
        server.process.wait(120)
    log = server.log_file.read_text()
    assert '"message": "request"' in log
    assert "--trust-remote-code: has no effect: families are built in" in log
    assert "--enable-auto-tool-choice: has no effect" in log
    assert "running requests have up to" in log
    assert '"message": "stopped after' in log
    assert "Traceback" not in log


def test_the_router_logs_time_path_status_and_id_of_each_request(tmp_path):
    with contextlib.closing(Process("router", "--decode", "http://127.0.0.1:1", log_to=tmp_path)) as router:
        assert comes_true(lambda: "routing" in router.log())
        answer = httpx.get(f"{router.url}/v1/models", headers={"x-request-id": "abc"}, timeout=60)
        assert answer.status_code == 503
        assert comes_true(lambda: "request_id" in router.log())
        line = next(line for line in router.log().splitlines() if "request_id" in line)
        assert re.match(r"\d\d:\d\d:\d\d INFO ", line)
        for field in ("request_id=abc", "method=GET", "path=/v1/models", "status=503"):
            assert field in line
