"""`mamba-jax eval`: how far one model's predictions are from another's, and that the demo model is as its card says."""

import json
import re
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import load_model
from checkpoints.resolve import resolve
from checkpoints.tokenizer import require_tokenizer
from mamba_jax.train.corpus import SAMPLE_PROBLEMS, SAMPLE_TEXT, problem_prompt, read_documents
from serving import LLM, SamplingParams
from serving.cli import measures
from serving.cli.main import run
from tests.support import cpu_options
from tests.support.engines.step_programs import few_programs, shared_programs
from tests.support.models.golden_case import log_probs
from tests.support.selection import slow

TOKENS = np.random.default_rng(0).integers(4, 500, 150).tolist()


@cache
def demo(quantization=None):
    return load_model("demo", dtype="float32", quantization=quantization, progress=False)


@pytest.mark.full
def test_is_what_it_is_defined_as():
    model, reference = demo("int4"), demo()
    found = measures.compare(model, reference, TOKENS, window=64, batch=2)
    kl, agree, own, other = [], [], [], []
    for start in range(0, len(TOKENS), 64):
        piece = np.array(TOKENS[start : start + 64])
        p, q = (log_probs(each, piece, 64) for each in (reference, model))
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        agree += (p.argmax(-1) == q.argmax(-1)).tolist()
        own += (-q[np.arange(len(piece) - 1), piece[1:]]).tolist()
        other += (-p[np.arange(len(piece) - 1), piece[1:]]).tolist()
    assert found.tokens == 150
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-3)
    assert found.largest_kl == pytest.approx(np.max(kl), rel=1e-3)
    assert found.agreement == pytest.approx(np.mean(agree))
    assert found.nats == pytest.approx(np.mean(own), rel=1e-4)
    assert found.reference_nats == pytest.approx(np.mean(other), rel=1e-4)
    assert found.kl > 1e-3


@pytest.mark.full
def test_a_model_is_itself_and_fewer_bits_are_farther_away(monkeypatch):
    # As users compile it: XLA's older emitters, which tests have, round the same logits differently in two fusions.
    users = jax.jit(measures._compare.__wrapped__, compiler_options=cpu_options.OF_USERS)
    monkeypatch.setattr(measures, "_compare", users)
    reference = demo()
    same = measures.compare(reference, reference, TOKENS)
    assert (same.kl, same.agreement) == (pytest.approx(0, abs=1e-9), 1.0)
    eight, four = (measures.compare(demo(kind), reference, TOKENS) for kind in ("int8", "int4"))
    assert 1e-7 < eight.kl < four.kl / 10
    assert four.agreement < eight.agreement
    with pytest.raises(ValueError, match="at least 2"):
        measures.compare(reference, reference, [1])


def test_command(tmp_path, capsys):
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("It is a truth universally acknowledged, that a single man in possession of a good fortune")
    given = ["eval", "--against", "demo", "--quantization", "int8"]
    assert run([*given, "--text", str(text), "--output", str(figures)]) == 0
    said, found = capsys.readouterr().out, json.loads(figures.read_text())
    assert f"KL divergence: {found['kl']:.5f} nats per token" in said
    assert 0 < found["kl"] < 0.01
    assert run([*given, "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt: no such file; give a text file as --text" in capsys.readouterr().err
    assert run(["eval", "--text", str(text)]) == 2
    assert "--text has no effect without --against" in capsys.readouterr().err


DEMO = Path(resolve("demo").files)
FIGURES = json.loads((DEMO / "figures.json").read_text())
CARD = (DEMO / "README.md").read_text()
SIXTEEN = 16


@pytest.mark.full
@pytest.mark.parametrize("source", ["austen", "python_docs", "maths"])
def test_bits_per_byte(source):
    texts = list(read_documents(DEMO / SAMPLE_TEXT))
    problems = list(read_documents(DEMO / SAMPLE_PROBLEMS))
    documents = problems if source == "maths" else [d for d in texts if d["id"].startswith(source + ":")]
    found = measures.bits_per_byte(demo(), require_tokenizer("demo"), documents)
    assert found == pytest.approx(FIGURES["bits_per_byte"][source], rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("drafts", [slow(False), True])
def test_the_same_problems_are_answered(drafts):
    problems = list(read_documents(DEMO / SAMPLE_PROBLEMS))[:SIXTEEN]
    flags = measures.MTP_DRAFTS if drafts else {}
    with few_programs(shared_programs):
        llm = LLM("demo", dtype="float32", max_num_seqs=SIXTEEN, max_model_len=512, warmup=False, **flags)
    params = SamplingParams(max_tokens=256, temperature=0.0)
    answers = llm.generate([problem_prompt(problem) for problem in problems], params, use_tqdm=False)
    right = [
        i for i, (d, o) in enumerate(zip(problems, answers, strict=True)) if measures.is_correct(d, o.outputs[0].text)
    ]
    assert right == [i for i in FIGURES["accuracy"]["right"] if i < SIXTEEN]
    if drafts:
        assert measures.total_stats(answers).mean_acceptance_length > 1.8


@pytest.mark.full
def test_the_card_has_the_figures():
    for source, bits in FIGURES["bits_per_byte"].items():
        assert f"{bits:.3f}" in CARD, source
    assert "{correct} of {problems}".format(**FIGURES["accuracy"]) in CARD
    for name in ("text", "maths"):
        found = FIGURES["acceptance"][name]
        line = next(line for line in CARD.splitlines() if line.startswith(f"| {name} | "))
        assert f"{found['mean_accepted_length']:.2f}" in line
        assert [f"{rate:.3f}" for rate in found["rates"]] == re.findall(r"0\.\d{3}", line)
