"""The demo model's corpus: Python's documentation, Jane Austen's novels, and problems of grade-school maths.

    python -m mamba_jax.train.corpus DIRECTORY [--problems N]

installs the packages that hold them (two of Debian, which takes root; two of PyPI, into DIRECTORY/packages) unless they
are there, and writes

    DIRECTORY/train/SOURCE.jsonl, DIRECTORY/heldout/SOURCE.jsonl    one document a line
    DIRECTORY/manifest.json                                         where each comes from, its license and its size

A document is `{"id", "text"}`, or `{"id", "question", "answer", "result"}`. What is held out never appears in train/:
every 25th file or chapter, and problems of another seed of which none equals a training problem.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mamba_jax.config import ModelConfigError
from mamba_jax.train import corpus_readers

DEBIAN_PACKAGES = ("python3.11-doc", "r-cran-janeaustenr")
PYPI_PACKAGES = ("rdata==1.1.0", "reasoning-gym==0.1.25")
SOURCES = {
    "python_docs": "Python 3.11 documentation, Debian package python3.11-doc; PSF-2.0, its examples also 0BSD",
    "austen": "six novels of Jane Austen, Debian package r-cran-janeaustenr; the texts are in the public domain",
    "gsm_symbolic": "gsm_symbolic of reasoning-gym 0.1.25 (PyPI); Apache-2.0",
}
HELD_OUT_EVERY = 25
TRAIN_SEED, HELD_OUT_SEED = 1, 900_001
HELD_OUT_PROBLEMS = 1000

SAMPLE_PROBLEMS, SAMPLE_TEXT = "heldout_problems.jsonl", "heldout_text.jsonl"
"""File names written by `write_sample`."""
_PIECE = 5000  # characters

Document = dict[str, Any]


def read_documents(path: Path, *, needs: tuple[str, ...] = ()) -> Iterator[Document]:
    """Reads the documents of a .jsonl file. Blank lines are skipped.

    Args:
        path: the file.
        needs: the fields that each document must have, as texts. By default: `text`, or `question` and `answer`.
    Raises:
        ModelConfigError: the file cannot be read, or a line is not a document.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                document = json.loads(line)
                if not isinstance(document, dict):
                    raise ValueError("not an object")
                is_problem = "question" in document and "text" not in document
                for name in needs or (("question", "answer") if is_problem else ("text",)):
                    if not isinstance(document.get(name), str):
                        raise ValueError(f"{name!r} is missing or not a text")
                yield document
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        expected = ", ".join(f'"{name}": ...' for name in needs or ("text",))
        why = " ".join(str(error).split())
        raise ModelConfigError(f"{path}, line {number}: {{{expected}}} is expected ({why})") from error


def problem_prompt(document: Document) -> str:
    """Returns a maths problem without its answer."""
    return f"Question: {document['question']}\nAnswer:"


def text_of(document: Document) -> str:
    """Converts a document, with an answer if it is a maths problem, to plain text. The text up to "Answer:" is the
    prompt."""
    return document["text"] if "text" in document else f"{problem_prompt(document)} {document['answer']}\n"


def prepare(directory: Path, *, problems: int = 40_000) -> dict[str, Any]:
    """Writes the corpus; returns the manifest.

    Args:
        directory: created if it does not exist.
        problems: number of maths problems for training.
    Raises:
        RuntimeError: a package cannot be installed or read.
    """
    environment = _install(directory)
    manifest: dict[str, Any] = {"held_out_seed": HELD_OUT_SEED, "train_seed": TRAIN_SEED, "sources": {}}
    for name, origin in SOURCES.items():
        if name == "gsm_symbolic":
            held = _read(environment, name, HELD_OUT_PROBLEMS, HELD_OUT_SEED)
            questions = {document["question"] for document in held}
            train = _read(environment, name, problems, TRAIN_SEED)
            train = [document for document in train if document["question"] not in questions]
        else:
            documents = _read(environment, name)
            held = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            ids = {document["id"] for document in held}
            train = [document for document in documents if document["id"] not in ids]
        manifest["sources"][name] = {
            "origin": origin,
            "train": _write(directory / "train" / f"{name}.jsonl", train),
            "heldout": _write(directory / "heldout" / f"{name}.jsonl", held),
        }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def write_sample(corpus: Path, directory: Path, *, problems: int = 200, text_bytes: int = 50_000) -> None:
    """Writes a small part of the held-out data to a model's directory, to evaluate it without the corpus.

    Args:
        corpus: directory written by `prepare`.
        directory: receives `heldout_problems.jsonl` and `heldout_text.jsonl`.
        problems: number of problems, from the beginning.
        text_bytes: approximate bytes of text from each source, taken from beginnings of documents all over the source.
    """
    pieces: list[Document] = []
    for path in sorted((corpus / "heldout").glob("*.jsonl")):
        documents = list(read_documents(path))
        if "question" in documents[0]:
            _write(directory / SAMPLE_PROBLEMS, documents[:problems])
            continue
        count = max(1, text_bytes // _PIECE)
        for document in documents[:: -(-len(documents) // count)]:
            start = document["text"][:_PIECE]
            pieces.append({"id": f"{path.stem}:{document['id']}", "text": start[: start.rfind("\n") + 1] or start})
    _write(directory / SAMPLE_TEXT, pieces)


def _install(directory: Path) -> dict[str, str]:
    """Install missing packages; return the environment variables with which the readers find them."""
    if not corpus_readers.PYTHON_DOCS.is_dir() or not corpus_readers.AUSTEN.is_dir():
        _run(["apt-get", "update", "-qq"])
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *DEBIAN_PACKAGES])
    packages = directory / "packages"
    if not packages.is_dir():
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), *PYPI_PACKAGES])
    return {**os.environ, "PYTHONPATH": str(packages)}


def _read(environment: dict[str, str], *arguments: object) -> list[Document]:
    command = [sys.executable, corpus_readers.__file__, *map(str, arguments)]
    return [json.loads(line) for line in _run(command, env=environment).splitlines()]


def _run(command: list[str], **options: Any) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True, **options)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"{' '.join(command[:4])}: failed ({error})") from error
    return done.stdout


def _write(path: Path, documents: Iterable[Document]) -> dict[str, Any]:
    """Writes documents; return the file's entry in the manifest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    content = "".join(lines).encode()
    path.write_bytes(content)
    text = sum(len(text_of(json.loads(line)).encode()) for line in lines)
    return {"documents": len(lines), "text_bytes": text, "sha256": hashlib.sha256(content).hexdigest()}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="mamba_jax.train.corpus", description="Prepare the demo model's corpus.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int, default=40_000, help="maths problems to train on")
    given = parser.parse_args(arguments)
    try:
        manifest = prepare(given.directory, problems=given.problems)
    except RuntimeError as error:
        sys.exit(f"corpus: {error}")
    for name, source in manifest["sources"].items():
        print(
            f"{name}: {source['train']['text_bytes']:,} bytes to train on, {source['heldout']['text_bytes']:,} held out"
        )


if __name__ == "__main__":
    main()
