"""`train`, `train-mtp` and `eval`, from a corpus of some hundred lines to a model that the engine runs with drafts."""

import json

import pytest
import yaml

import checkpoints
from mamba_jax.version import install_advice
from serving import LLM, SamplingParams
from serving.cli.main import run
from serving.cli.measures import is_correct, plain_number, result_of
from tests.serving.cli.test_cli import read_lines, write_lines
from tests.support.models.tiny_configs import TRAINABLE

pytestmark = pytest.mark.slow

RUN = {
    "model": TRAINABLE | {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2},
    "data": {"mixture": {"text": 0.5, "maths": 0.5}, "aligned": ["maths"], "chat_share": 0.5},
    "optimizer": {"name": "muon", "learning_rate": 0.01, "warmup_steps": 2},
    "drafts": {"depth_weights": [1.0, 0.5], "targets": "model", "detach": True},
    "steps": 10, "batch_size": 8, "sequence_length": 32, "log_every": 5,
}  # fmt: skip


def problem(i):
    question, answer = f"What is {i} and {i}?", f"{i}+{i}={2 * i}\n#### {2 * i}"
    return {"id": f"1/{i}", "question": question, "answer": answer, "result": str(2 * i)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("train")
    texts = [{"id": f"words:{i}", "text": " ".join(f"{w} and" for w in "abcdefgh"[i % 8 :]) * 20} for i in range(40)]
    (directory / "corpus/train").mkdir(parents=True)
    (directory / "heldout").mkdir()
    write_lines(directory / "corpus/train/text.jsonl", *texts)
    write_lines(directory / "corpus/train/maths.jsonl", *(problem(i) for i in range(200)))
    write_lines(directory / "heldout/heldout_text.jsonl", *texts[:4])
    write_lines(directory / "heldout/heldout_problems.jsonl", *(problem(i) for i in range(500, 506)))
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    line = ["train", "--config", "run.yaml", "--output", "run", "--corpus", "corpus"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert run(line) == 0
    return directory


def test_train_writes_a_model_that_drafts(trained):
    assert [record["step"] for record in read_lines(trained / "run/log.jsonl")] == [5, 10]
    model = str(trained / "run/model")
    prompts, params = ["a and b", "Question: What is 2 and 2?\nAnswer:"], SamplingParams(max_tokens=8, temperature=0.0)
    outputs = []
    for flags in ({}, {"speculative_method": "mtp", "adaptive_drafts": False}):
        llm = LLM(model, max_num_seqs=2, max_model_len=128, **flags)
        outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
    assert llm.engine.loop.stats.drafts.steps > 0
    assert llm.tokenizer.has_chat_template


def test_a_loss_that_is_not_finite_is_exit_code_1(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    line = ["train", "--config", "run.yaml", "--output", "diverged", "--corpus", "corpus"]
    changes = ["--set", "optimizer.learning_rate=1e38", "--set", "optimizer.warmup_steps=0"]
    assert run([*line, *changes, "--set", "optimizer.name=adamw"]) == 1
    assert "the loss or its gradient is not finite at step" in capsys.readouterr().err
    assert not (trained / "diverged/model").exists()


def test_a_missing_plot_is_said(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.setattr("mamba_jax.train.loop.plot_losses", lambda records, path: False)
    assert run(["train", "--config", "run.yaml", "--output", "run", "--corpus", "corpus"]) == 0
    assert f"loss.svg is not drawn: {install_advice('plots')}" in capsys.readouterr().err


def test_train_mtp_leaves_the_rest_alone(trained):
    source, target = trained / "run/model", trained / "drafting"
    line = ["train-mtp", "--model", str(source), "--data", str(trained / "corpus/train/text.jsonl")]
    options = ["--steps", "2", "--sequence-length", "32", "--depth", "2"]
    assert run([*line, "--output", str(target), *options]) == 0
    assert (target / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (target / "mtp.safetensors").is_file()
    output = LLM(
        str(target), max_num_seqs=1, max_model_len=128, speculative_method="mtp", adaptive_drafts=False
    ).generate("a and", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 4


def test_eval(trained):
    where = ["--model", str(trained / "run/model"), "--data", str(trained / "heldout")]
    figures = trained / "figures.json"
    assert run(["eval", *where, "--prompts", "0", "--max-num-seqs", "4", "--output", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert 0 < found["bits_per_byte"]["words"] < 8
    assert found["accuracy"]["problems"] == 6


def test_a_quantized_checkpoint_is_not_trained(trained, tmp_path, capsys):
    narrow = checkpoints.convert(trained / "run/model", tmp_path / "q", form="hugging-face", quantization="int8")
    line = ["train-mtp", "--model", str(narrow), "--data", str(trained / "corpus/train/text.jsonl")]
    assert run([*line, "--output", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert "weights are quantized" in error
    assert "training needs the wide checkpoint" in error
    assert error.count("\n") == 1


def test_results():
    assert result_of("so 3*4=12\n#### 1,200.0\n#### 7") == "1200"
    assert result_of("12") is None
    assert [plain_number(text) for text in ("3.50", "100", "-2.0", "1,000.")] == ["3.5", "100", "-2", "1000"]
    assert is_correct(problem(4), "4+4=8\n#### 8")
    assert not is_correct(problem(4), "8")
