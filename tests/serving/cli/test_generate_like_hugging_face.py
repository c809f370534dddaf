"""`generate --input` on directories of every recurrence that is not Mamba2 says what Hugging Face says.

The fixtures' tensors have the names and shapes that transformers gave them, and `mtp.*` those of the published models.
"""

import json

import numpy as np
import pytest

from serving.cli.main import run
from tests.golden.recipes import RECIPES
from tests.support.models.golden_case import CLEAR_GAP, OTHER_RECURRENCES, TO_HUGGING_FACE, Case
from tests.support.selection import slow

QUICK = "lfm2"
OTHERS = [name for name in OTHER_RECURRENCES if name != QUICK]


@pytest.fixture
def answers(tmp_path):
    """Answers to a fixture's prompts, by the command, with further options."""

    def ask(case: Case, *options: str) -> list[dict]:
        source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
        target.unlink(missing_ok=True)
        lines = [
            {"id": i, "prompt_token_ids": prompt.tolist(), "max_tokens": 16, "temperature": 0, "logprobs": 8}
            | {"ignore_eos": True}
            for i, prompt in enumerate(case.prompts)
        ]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ["--input", str(source), "--output", str(target)]
        sizes = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "128"]
        blocks = ["--state-block-size", "32", "--tile-size", "32", "--page-size", "16", "--num-slots", "64"]
        common = ["generate", "--model", str(case.directory), "--dtype", "float32", "--no-compilation-cache"]
        assert run([*common, *files, *sizes, *blocks, *options]) == 0
        return [json.loads(line) for line in target.read_text().splitlines()]

    return ask


@pytest.mark.full
@pytest.mark.parametrize("name", [QUICK, *(slow(name) for name in OTHERS)])
def test_generate_agrees_with_hugging_face(name, answers):
    case = Case(name)
    cold = answers(case, "--mamba-cache-mode", "none")
    assert [line["id"] for line in cold] == list(range(len(case.prompts)))
    for prompt, line in enumerate(cold):
        greedy, gaps = case.greedy(prompt)
        clear = next((i for i, gap in enumerate(gaps) if gap < CLEAR_GAP), len(gaps))
        assert line["token_ids"][:clear] == greedy[:clear]
        expected = {
            int(token): value
            for at, ids, values in zip(*case.expected(prompt), strict=True)
            if at == len(case.prompts[prompt]) - 1
            for token, value in zip(ids, values, strict=True)
        }
        compared = [(expected[token], value) for token, value in line["logprobs"][0] if token in expected]
        assert len(compared) >= 5
        np.testing.assert_allclose(*zip(*compared, strict=True), atol=TO_HUGGING_FACE)
    if name != QUICK:
        source = "mtp" if RECIPES[name].mtp else "ngram"
        method = ("--speculative-method", source, "--num-speculative-tokens", "3")
        drafted = answers(case, "--mamba-cache-mode", "all", *method)
        assert [line["token_ids"] for line in drafted] == [line["token_ids"] for line in cold]
