"""The command line: what it prints, what it writes, and one line with exit code 2 for whatever the user got wrong."""

import functools
import json
import re
from pathlib import Path

import jax
import pytest

from checkpoints.resolve import DEMO_DIRECTORY
from mamba_jax.train.corpus import SAMPLE_TEXT
from serving.cli.main import run, translate_arguments
from serving.engine.llm import LLM

ROOT = Path(__file__).resolve().parents[3]
GOLDEN, LFM2 = (ROOT / "tests" / "golden" / name for name in ("nemotronh", "lfm2"))
HOSTS = "--coordinator a:1 --num-hosts 2 --host-id 0"
SMALL = ["--model", str(GOLDEN), "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]


def write_lines(path: Path, *lines) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "give either a PROMPT or --input FILE"),
        (["generate", "x", "--input", "y"], "give either a PROMPT or --input FILE"),
        (["generate", "--input", "y"], "--input and --output must be given together"),
        (["generate", "--input", "missing", "--output", "z"], "--input missing: no such file"),
        (["generate", "x", "--overwrite"], "--overwrite, --retry-failed and --ignore-failed are for --output"),
        (["generate", "x", "--model", "/does/not/exist"], "/does/not/exist: no such model"),
        (["generate", "x", "--model", "{golden}"], "no tokenizer"),
        (["generate", "x", "--temperature", "-1"], "temperature: must be greater than or equal to 0, got -1.0"),
        (["generate", "x", "--temperature", "hot"], "Invalid value for '--temperature'"),
        (["inspect", "--model", "demo", "--page-size", "-5"], "Invalid value for '--page-size'"),
        (["eval", "--model", "{golden}"], "no heldout_problems.jsonl in"),
        (["eval", "--problems", "0"], "Invalid value for '--problems'"),
        (["train-grpo", "--learning-rate", "nan"], "--learning-rate nan: a number above 0 is expected"),
        (["check", "--json", "."], "--json .: exists and is not a report of `mamba-jax check`; give another file"),
        (["train-grpo", "--learning-rate", "-1"], "--learning-rate -1.0: a number above 0 is expected"),
        (["convert", "/does/not/exist", "there"], "/does/not/exist: no such model"),
        (["generate", "x", "--config", "a.yaml", "--config=b.yaml"], "--config is given more than once"),
        (["inspect", "--model", "{golden}", "--hf-overrides", '{{"model_type": "llama"}}'], "'llama' is not"),
        (["inspect", "--kernels", "--platform", "tpus"], "--platform must be cpu, gpu or tpu, got 'tpus'"),
        (["levitate"], "no command 'levitate'"),
        # Words that are nearly right.
        (["serv"], "no command 'serv'; did you mean 'serve'?"),
        (["serve", "--max-model-length", "4"], "No such option: --max-model-length; did you mean '--max-model-len'?"),
        (["inspect", "--model", "{golden}", "--adapter", "{golden}"], "adapter_config.json"),
        (["inspect", "--modle", "demo"], "No such option: --modle; did you mean '--model'?"),
        (["generate", "x", "--gpu-memory-utilizaton", "1"], "did you mean '--gpu-memory-utilization'?"),
        # Of servers.
        *(
            (["serve", *words.split()], said)
            for words, said in (
                ("--port 70000", "port: must be less than or equal to 65535"),
                ("--log-format xml", "log_format"),
                ("--model /does/not/exist", "/does/not/exist: no such model"),
                ("--host no_address", "cannot listen on no_address"),
                ("--host-id 1", "coordinator, num_hosts and host_id must be given together"),
                (f"{HOSTS} --role decode", "--role decode does not support several hosts"),
                (f"{HOSTS} --split-secret {'0' * 16}", "(routers that follow it) does not support several hosts"),
                ("demo --port 0 --lora-modules a=b", "lora_modules needs enable_lora or max_initial_states"),
                ("demo --port 0 --enable-lora --lora-modules a=/nowhere", "/nowhere"),
                ("--override-generation-config {{", "override_generation_config: must be valid JSON"),
                ('--override-generation-config {{"top_q":1}}', "did you mean 'top_p'"),
                ("--default-chat-template-kwargs []", "must be a JSON object"),
                ("--ssl-keyfile key.pem", "must be given together"),
                ("--ssl-keyfile key.pem --ssl-certfile no.pem", "--ssl-certfile no.pem: cannot be used"),
                ("--max-logprobs 5000", "max_logprobs"),
                ("--reasoning-parser other", "reasoning_parser"),
                ("--tool-call-parser pythonic", "tool_call_parser"),
                ("--no-such-flag", "No such option"),
                *((f"--max-model-len={text}", "is not a whole number") for text in ("", "k", "1.5", "1e3", "many")),
            )
        ),
        # Of plans and training.
        *(
            (["plan", "--analysis", *words.split()], said)
            for words, said in (
                ("--model nemotron-h-8b --topology v7-8", "is not known"),
                ("--model falcon-h1-0.5b --topology v5e-16", "error: v5e-16: "),
                ("--model nemotron-h-8b --topology h100-8 --tensor-parallel-size 4", "has 8 device"),
                ("--model nothing-here --topology h100", "nothing-here: no such model"),
                ("--model nemotron-nano-9b --topology h100", "did you mean nemotron-nano-9b-v2 or"),
                ("--model nemotron-h-8b --topology h100 --at-context 9000", "at most 8192 tokens"),
                ("--model nemotron-h-8b --topology all --full", "need one machine"),
            )
        ),
        *(
            ([command, "--output", *words.split()], said)
            for command, words, said in (
                ("train", "x", "give --config (a new model) or --model"),
                ("train", "x --config none.yaml", "none.yaml: cannot be read"),
                ("train", "x --model none --corpus {texts}", "no such model"),
                ("train", "x --model demo --corpus none", "none: no corpus"),
                ("train", "x --model demo --corpus {texts} --validation none", "none: no validation data"),
                ("train", "x --model demo --corpus {texts} --set data.held_out=1e-9", "has no sequence of 1025 tokens"),
                ("train", "x --model demo --set data.held_out=1", "data.held_out is 1: input should be less than 1"),
                ("train", "x --model demo --corpus {texts} --set model.x=8", "remove `model` from the config file"),
                ("train", "x --model demo --set steps=0", "steps is 0"),
                ("train", "x --model demo --set steps", "NAME=VALUE"),
                ("train", "x --model demo --set steps=[", "--set steps=[: not a value in YAML"),
                ("train-mtp", "x --model none --data none", "no such file"),
                ("train-mtp", "x --model none --data {texts}", "no such model"),
                ("train-mtp", "used --model none --data {texts}", "already exists and is not an empty directory"),
                ("train-lora", "used --model demo --data {texts}", "already exists and is not an empty directory"),
                ("train-lora", "x --model demo --data {texts} --target-modules in_proj,none", "target module 'none'"),
                ("train-grpo", "x --lora --target-modules query", "'query' is no dense layer of the model; known are"),
                ("train-grpo", "x --lora --alpha 0", "alpha above 0"),
            )
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, said, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("used/by/the/user").mkdir(parents=True)
    jax.devices()
    capfd.readouterr()  # what libraries print when they are loaded
    code = run([argument.format(golden=GOLDEN, texts=DEMO_DIRECTORY / SAMPLE_TEXT) for argument in arguments])
    out, err = capfd.readouterr()
    assert code == 2
    assert said in " ".join(err.split())
    lines = err.splitlines()
    assert len([line for line in lines if "error" in line]) == 1
    assert len(lines) == 1 or arguments[-1] == "a=/nowhere", "this one loads a model first"
    assert "Traceback" not in err
    assert not out


def test_one_prompt_is_streamed_to_stdout(capfd, monkeypatch):
    arguments = ["--max-tokens", "4", "--max-model-len", "128", "--ignore-eos"]
    assert run(["generate", "The quick brown fox", *arguments]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("The quick brown fox")
    assert out.endswith("\n")
    assert "Traceback" not in err
    assert "state slots" not in err
    assert run(["generate", "The quick brown fox", "--verbose", *arguments]) == 0
    out_again, err = capfd.readouterr()
    assert out_again == out
    assert "decoding keeps" in err
    monkeypatch.setattr("serving.engine.llm.LLM", lambda **flags: pytest.fail(str(flags)))
    with pytest.raises(pytest.fail.Exception, match="'compilation_cache': False"):
        run(["generate", "x", "--no-compilation-cache"])


YARN = '{"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 262144}}'
KERNELS = ["--model", "nemotron-3-nano-30b-a3b", "--kernels", "--platform"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", str(GOLDEN)], ("NemotronH", "M-M*-M")),
        (["--model", "mamba2-2.7b"], ("none: no attention",)),
        (["--model", "qwen3-next-80b-a3b", "--hf-overrides", YARN], ("1,048,576",)),
        (["--model", str(LFM2), "--adapter", str(LFM2 / "adapter")], ("(100.0% of their parameters)",)),
        (["--kernels", "--platform", "tpu"], ("decode: paged_attention xla (not pallas_tpu: heads have a size of",)),
        *(
            pytest.param([*KERNELS, platform], lines, marks=pytest.mark.full)
            for platform, lines in (
                ("tpu", ("decode: paged_attention pallas_tpu", "prefill: gated_scan pallas_tpu")),
                ("gpu", ("decode: gated_update pallas_gpu", "expert_mlp xla (not pallas_gpu: 2048 tokens, more than")),
            )
        ),
    ],
)
def test_inspect_describes_models_and_kernels_without_loading(words, expected, capfd):
    assert run(["inspect", *words]) == 0
    said = " ".join(capfd.readouterr().out.split())
    for line in expected:
        assert line in said


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """A batch with good and bad lines, run once without a tokenizer. Each run makes an engine; here all share one."""
    folder = tmp_path_factory.mktemp("batch")
    greedy = {"temperature": 0, "ignore_eos": True}
    source = write_lines(
        folder / "in.jsonl",
        {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 5, "logprobs": 3} | greedy,
        "this is not JSON\n",
        {"id": "b", "prompt": "no tokenizer here"},
        "\n",
        {"id": 3, "prompt_token_ids": [5, 6, 7], "max_tokens": 2} | greedy,
        {"id": "d", "prompt_token_ids": [5], "max_tokens": 2, "temperatur": 0},
        {"id": "e", "prompt_token_ids": [5], "max_tokens": -2},
        {"id": "f", "prompt_token_ids": [99999], "max_tokens": 2},
        "[1, 2]\n",
        {"id": "g", "prompt_token_ids": [9, 8], "max_tokens": 3, "seed": 5, "n": 2} | greedy | {"temperature": 1},
    )
    target = folder / "out.jsonl"
    made = functools.cache(lambda items: LLM(**dict(items)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.engine.llm.LLM", lambda **flags: made(tuple(sorted(flags.items()))))
        code = run(["generate", "--input", str(source), "--output", str(target), *SMALL])
        yield source, target, code


def test_a_batch_answers_every_line_in_order(batch):
    _, target, code = batch
    lines = read_lines(target)
    assert code == 1  # some lines failed
    assert [line["id"] for line in lines] == ["a", "line-2", "b", 3, "d", "e", "f", "line-9", "g"]
    by_id = {line["id"]: line for line in lines}
    first = by_id["a"]
    assert first["text"] == ""
    assert first["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}
    assert len(first["token_ids"]) == len(first["logprobs"]) == 5
    for token, pairs in zip(first["token_ids"], first["logprobs"], strict=True):
        assert pairs[0][0] == token  # greedy
        assert [value for _, value in pairs] == sorted((value for _, value in pairs), reverse=True)
        assert len(pairs) == 3
    assert by_id[3]["token_ids"] == first["token_ids"][:2]
    assert "logprobs" not in by_id[3]
    assert "not valid JSON" in by_id["line-2"]["error"]
    assert "no tokenizer" in by_id["b"]["error"]
    assert "did you mean 'temperature'" in by_id["d"]["error"]
    assert "max_tokens" in by_id["e"]["error"]
    assert "not in the vocabulary" in by_id["f"]["error"]
    assert "must be a JSON object" in by_id["line-9"]["error"]
    assert len(by_id["g"]["choices"]) == 2
    assert by_id["g"]["usage"]["completion_tokens"] == 6


def test_a_batch_goes_on_where_it_stopped(batch, tmp_path, capfd):
    source, target, _ = batch
    whole = target.read_text()
    lines = whole.splitlines(keepends=True)
    part = tmp_path / "out.jsonl"
    # Some answers, not in order, and a line that a crash has cut off.
    part.write_text(lines[3] + lines[1] + lines[0][:30])
    command = ["generate", "--input", str(source), "--output", str(part), *SMALL]
    assert run(command) == 1
    said = capfd.readouterr().err
    assert "2 already in the output" in said
    assert "6 of 9 lines failed (--retry-failed answers them again)" in said
    assert "tokens/s" in said
    again, before = read_lines(part), read_lines(target)
    assert [line["id"] for line in again] == [line["id"] for line in before]
    assert [line.get("token_ids") for line in again] == [line.get("token_ids") for line in before]
    assert run([*command, "--ignore-failed"]) == 0
    assert read_lines(part) == again
    assert run([*command, "--temperature", "0.5"]) == 2
    assert 'the answer to line "a" is to another line or to other sampling options' in capfd.readouterr().err


def test_progress_is_printed_without_a_terminal(batch, tmp_path, capfd, monkeypatch):
    source, _, _ = batch
    monkeypatch.setattr("checkpoints.placing.LINE_EVERY", 0.001)
    run(["generate", "--input", str(source), "--output", str(tmp_path / "new.jsonl"), *SMALL])
    assert re.search(r"\d of 9 requests after \d+ s; ", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("variable", "value", "words", "said"),
    [
        ("PORT", "abc", ["serve"], "Invalid value for '--port': 'abc' is not a whole number"),
        ("MAX_NUM_SEQS", "0", ["generate", "x"], "max_num_seqs: must be greater than or equal to 1, got 0"),
        ("HF_OVERRIDES", "[]", ["inspect"], "hf_overrides: a JSON object is expected"),
        ("TOPOLOGY", "v9", ["plan"], "topology 'v9' is not known"),
        ("WARMUP", "maybe", ["chat"], "Invalid value for '--warmup'"),
        ("CONFIG", "no.yaml", ["generate", "x"], "config file no.yaml: cannot be read (No such file"),
        ("DTYPE", "no", ["generate", "--dtype", "none", "x"], "'bfloat16' or 'float16', got 'none'"),
        ("PORT", "tcp://10.0.0.1:80", ["serve", "--max-num-seqs", "0"], "max_num_seqs: must be greater"),  # a link
        ("PROT", "1", ["generate"], "variable MAMBA_JAX_PROT is not read; did you mean 'MAMBA_JAX_PORT'?"),
    ],
)
def test_options_from_the_environment(variable, value, words, said, capfd, monkeypatch):
    monkeypatch.setenv(f"MAMBA_JAX_{variable}", value)
    monkeypatch.setenv("MAMBA_JAX_CORPUS", "an option of another command")
    for name in ("SERVICE_PORT_HTTP", "SERVICE_HOST", "PORT_80_TCP_ADDR"):  # links to a service of Kubernetes
        monkeypatch.setenv(f"MAMBA_JAX_{name}", "10.0.0.1")
    assert run(words) == 2
    error = capfd.readouterr().err
    assert said in error
    assert "MAMBA_JAX" not in error.replace(said, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu-memory-utilization: 1.5", "memory_utilization: must be less than or equal to 1"),
        ("no_such: 1", "config file flags.yaml: unknown option 'no_such'"),
        ("max_model_len: 2020-13-45", "config file flags.yaml: month must be in 1..12"),
        ("max_model_len: " + "1" * 5000, "config file flags.yaml: Exceeds the limit"),
        ("[" * 1000, "config file flags.yaml: maximum recursion depth exceeded"),
        ("hf_overrides: &a {a: *a}", "config file flags.yaml: Circular reference"),
        ('hf_overrides: \'{"a": ' + "1" * 5000 + "}'", "hf_overrides: not JSON (Exceeds the limit"),
        ("max_model_length: 1", "unknown option 'max_model_length'; did you mean 'max_model_len'?"),
        ("pipeline_parallel_size: 2", "--pipeline-parallel-size is not supported"),
        ("speculative-config: {method: medusa}", "method 'medusa'"),
        ("kv_transfer_config: a", "--kv-transfer-config is not supported"),
        ("enable_lora: false\ntrust-remote-code: true\nmax-num-seqs: 0", "max_num_seqs: must be greater"),
    ],
)
def test_a_file_has_the_same_options_as_the_command_line(text, said, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("flags.yaml").write_text(text + "\n")
    assert run(["generate", "x", "--config=flags.yaml"]) == 2
    assert said in capfd.readouterr().err


def test_flags_from_a_file_yield_to_the_command_line_and_a_list_there_replaces_the_files(tmp_path):
    config = tmp_path / "server.toml"
    config.write_text('served-model-name = ["a", "b"]\nblock-size = 16\n[default_chat_template_kwargs]\nx = false\n')
    assert translate_arguments("serve", ["m", "--config", str(config)]) == [
        "--served-model-name", "a", "--served-model-name", "b", "--page-size", "16",
        '--default-chat-template-kwargs={"x": false}', "m",
    ]  # fmt: skip
    words = translate_arguments("serve", ["--config", str(config), "--served-model-name", "c", "d", "--no-warmup"])
    assert words[-5:] == ["--served-model-name", "c", "--served-model-name", "d", "--no-warmup"]
    assert "a" not in words
