"""The demo model is the one that its card describes: `mamba-jax eval` gives the results stored with it."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from checkpoints import load_model
from checkpoints.resolve import resolve
from checkpoints.tokenizer import require_tokenizer
from mamba_jax.train.corpus import SAMPLE_PROBLEMS, SAMPLE_TEXT, problem_prompt
from serving import LLM, SamplingParams
from serving.cli.evaluation import measures

pytestmark = pytest.mark.full

DEMO = Path(resolve("demo").files)
FIGURES = json.loads((DEMO / "figures.json").read_text())
CARD = (DEMO / "README.md").read_text()
SIXTEEN = 16


@cache
def model():
    return load_model("demo", dtype="float32", progress=False)


@pytest.mark.parametrize("source", ["austen", "python_docs", "maths"])
def test_bits_per_byte(source):
    texts = measures.read_some(DEMO / SAMPLE_TEXT, None)
    problems = measures.read_some(DEMO / SAMPLE_PROBLEMS, None)
    documents = problems if source == "maths" else [d for d in texts if d["id"].startswith(source + ":")]
    found = measures.bits_per_byte(model(), require_tokenizer("demo"), documents)
    assert found == pytest.approx(FIGURES["bits_per_byte"][source], rel=0.01)


@pytest.mark.parametrize("drafts", [False, True])
def test_the_same_problems_are_answered(drafts):
    problems = measures.read_some(DEMO / SAMPLE_PROBLEMS, SIXTEEN)
    flags = measures.MTP_DRAFTS if drafts else {}
    llm = LLM("demo", dtype="float32", max_num_seqs=SIXTEEN, max_model_len=512, warmup=False, **flags)
    params = SamplingParams(max_tokens=256, temperature=0.0)
    answers = llm.generate([problem_prompt(problem) for problem in problems], params, use_tqdm=False)
    right = [
        i for i, (d, o) in enumerate(zip(problems, answers, strict=True)) if measures.is_correct(d, o.outputs[0].text)
    ]
    assert right == [i for i in FIGURES["accuracy"]["right"] if i < SIXTEEN]
    if drafts:
        assert measures.total_stats(answers).mean_acceptance_length > 1.8


def test_the_card_has_the_figures():
    for source, bits in FIGURES["bits_per_byte"].items():
        assert f"{bits:.3f}" in CARD, source
    assert "{correct} of {problems}".format(**FIGURES["accuracy"]) in CARD
    for name in ("text", "maths"):
        found = FIGURES["acceptance"][name]
        line = next(line for line in CARD.splitlines() if line.startswith(f"| {name} | "))
        assert f"{found['mean_accepted_length']:.2f}" in line
        assert [f"{rate:.3f}" for rate in found["rates"]] == re.findall(r"0\.\d{3}", line)
