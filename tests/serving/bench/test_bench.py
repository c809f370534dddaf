"""`mamba-jax bench`: every program starts, parses its options, measures something small, and says on what."""

from __future__ import annotations

import itertools
import json

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from checkpoints.random import write_random
from serving.api.http.settings import ConnectionBounds
from serving.bench import latency
from serving.bench.report import check_plot
from serving.cli.bench import PROGRAMS
from serving.cli.main import run
from tests.support.models.tiny_configs import TRAINABLE
from tests.support.servers.live_server import running


def lines_of(text: str) -> list[dict]:
    """The JSON lines of an output, the first of which must describe machine and command."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert lines[0]["metric"] == "environment"
    assert {"cpu", "instructions", "cores", "python", "jax", "model", "command"} <= set(lines[0])
    return lines


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_comes_from_the_program(name, capfd):
    assert run(["bench", name, "--help"]) == 0
    assert "usage:" in capfd.readouterr().out


def test_wrong_options_are_exit_code_2():
    assert run(["bench", "throughput", "--prompts", "many"]) == 2
    assert run(["bench", "latency", "--rate", "0"]) == 2
    assert run(["bench", "throughput", "--engine", "max_num_seqs"]) == 2
    assert run(["bench", "throughput", "--prompts", "0"]) == 2
    assert run(["bench", "nothing"]) == 2


@pytest.mark.full
def test_throughput(tmp_path, capfd):
    model, plot = write_random(tmp_path / "tiny", TRAINABLE), tmp_path / "plot.svg"
    flags = ["tile_size=8", "state_block_size=16", "max_num_seqs=2", "max_model_len=64", "page_size=8"]
    sizes = ["--prompts", "2", "--prompt-tokens", "20", "--output-tokens", "3", "--shared", "16", "--reps", "2"]
    engine = [word for flag in flags for word in ("--engine", flag)]
    assert run(["bench", "throughput", str(model), *sizes, *engine, "--plot", str(plot)]) == 0
    lines = {line["metric"]: line for line in lines_of(capfd.readouterr().out)}
    assert lines["output_tokens_per_s"]["v"] == pytest.approx(3 * lines["requests_per_s"]["v"], rel=0.02)
    assert len(lines["tokens_per_s"]["each"]) == 2
    assert lines["run"]["compiled_while_measuring"] == 0
    assert lines["environment"]["model"] == "tiny"
    assert plot.read_text().startswith("<?xml")


@pytest.fixture
def canned():
    """The URL of a server that answers as OpenAI's: three pieces of text, then usage. Every fourth request fails."""
    app, numbers = FastAPI(), itertools.count(1)
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "canned"}]})

    @app.post("/v1/completions")
    async def complete(body: dict):
        assert body["stream"]
        if next(numbers) % 4 == 0:
            return JSONResponse({"error": {"message": "queue full"}}, 429)
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        events = [{"choices": [{"text": text}]} for text in ("a", "b", "c", "")]
        events.append({"choices": [], "usage": usage})
        return PlainTextResponse("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    with running(app, ConnectionBounds()) as (_, url):
        yield url


def test_latency_against_a_server(canned, capfd, tmp_path):
    words = ["--base-url", canned, "--request-rate", "500", "--num-prompts", "8"]
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"a user's picture")
    for path in (plot, tmp_path):
        assert run(["bench", "serve", *words, "--plot", str(path)]) == 2
        assert "is not a picture of a benchmark" in capfd.readouterr().err
    assert plot.read_bytes() == b"a user's picture"
    plot.unlink()
    # Exit code 1: some requests have failed.
    assert run(["bench", "serve", *words, "--prompt-words", "5", "--plot", str(plot)]) == 1
    lines = {line["metric"]: line for line in lines_of(capfd.readouterr().out)}
    assert lines["environment"]["model"] == "canned"
    assert "device" not in lines["environment"]
    load = lines["load"]
    assert (load["requests"], load["failed"]) == (8, 2)
    assert "queue full" in load["errors"][0]
    assert (load["prompt_tokens"], load["cached_tokens"]) == (60, 24)
    assert lines["ttft_ms"]["count"] == 6
    assert lines["itl_ms"]["count"] == 12
    assert 0 < lines["ttft_ms"]["p50"] <= lines["ttft_ms"]["p99"] <= lines["e2e_ms"]["p99"]
    assert plot.stat().st_size > 0
    check_plot(str(plot))


def test_long_prompts_with_short_ones(canned, capfd):
    words = ["--url", canned, "--rate", "500", "--requests", "4"]
    run(["bench", "latency", *words, "--prompt-words", "5", "--long-requests", "3", "--long-prompt-words", "900"])
    lines = {(line.get("of"), line["metric"]): line for line in lines_of(capfd.readouterr().out)}
    assert lines[None, "load"]["requests"] == 4
    assert lines["long prompts", "load"]["requests"] == 3
    assert lines[None, "load"]["failed"] + lines["long prompts", "load"]["failed"] == 1
    assert lines["long prompts", "ttft_ms"]["count"] >= 2


def test_latency_without_a_server_is_one_line(capfd):
    assert run(["bench", "latency", "--url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_figures_of_one_answer():
    answer = latency.Answer(sent=1.0, pieces=[1.5, 1.6, 1.8], ended=2.0, usage={"completion_tokens": 4})
    figures = answer.figures
    assert figures["ttft_ms"] == pytest.approx([500])
    assert figures["itl_ms"] == pytest.approx([100, 200])
    assert figures["tpot_ms"] == pytest.approx([100])  # 300 ms for the three tokens after the first
    assert figures["e2e_ms"] == pytest.approx([1000])
