"""The demo model's corpus: Python's documentation, Jane Austen's novels, and problems of grade-school maths.

    python -m benchmarks.demo_corpus DIRECTORY [--problems N]

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
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mamba_jax.train.corpus import Document, text_of, write_documents

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
PYTHON_DOCS = Path("/usr/share/doc/python3.11/html/_sources")
AUSTEN = Path("/usr/lib/R/site-library/janeaustenr/data")
# Each question of the data set ends with this text, which is not part of the problem.
REQUEST = " Give the result as your final answer. Do not include units."


def python_docs() -> Iterator[dict[str, str]]:
    """Yield the sources of the Python documentation, one document for each file."""
    for path in sorted(PYTHON_DOCS.rglob("*.rst.txt")):
        yield {"id": str(path.relative_to(PYTHON_DOCS)), "text": path.read_text(encoding="utf-8")}


def austen() -> Iterator[dict[str, str]]:
    """Yield the chapters of the six novels, with the lines of a paragraph joined.

    R stores them in a "lazy-load database": an index of (offset, length) by name, and for each name the length before
    compression (four bytes, big endian) followed by zlib's output, which holds a serialized vector of lines.
    """
    import rdata

    def parsed(data: bytes) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Unknown file type: assumed RDS"
            return rdata.conversion.convert(rdata.parser.parse_data(data))

    index = parsed((AUSTEN / "Rdata.rdx").read_bytes())["variables"]  # type: ignore[index]
    database = (AUSTEN / "Rdata.rdb").read_bytes()
    for novel, (offset, length) in sorted((str(name), place) for name, place in index.items()):
        data = zlib.decompress(database[offset + 4 : offset + length])
        assert len(data) == struct.unpack(">I", database[offset : offset + 4])[0]
        lines = [str(line) for line in parsed(data)]  # type: ignore[attr-defined]
        for number, chapter in enumerate(_chapters(lines)):
            yield {"id": f"{novel}/{number}", "text": chapter}


def _chapters(lines: list[str]) -> Iterator[str]:
    chapter: list[str] = []
    for line in [*lines, "CHAPTER"]:
        if line.upper().startswith("CHAPTER") and chapter:
            paragraphs = "\n".join(chapter).split("\n\n")
            text = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
            if len(text) > 1000:
                yield text + "\n"
            chapter = []
        chapter.append(line)


def gsm_symbolic(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield problems of grade-school maths with a worked answer that ends in `#### result`."""
    import reasoning_gym

    for number, item in enumerate(reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)):
        answer, result = item["metadata"]["answer_cot"].strip(), item["answer"]
        if not answer.endswith(f"#### {result}"):
            answer = f"{answer.split('####')[0].rstrip()}\n#### {result}"
        question = item["question"].removesuffix(REQUEST)
        yield {"id": f"{seed}/{number}", "question": question, "answer": answer, "result": result}


def prepare(directory: Path, *, problems: int = 40_000) -> dict[str, Any]:
    """Writes the corpus, with as many maths problems for training; returns the manifest."""
    install(directory)
    manifest: dict[str, Any] = {"held_out_seed": HELD_OUT_SEED, "train_seed": TRAIN_SEED, "sources": {}}
    for name, origin in SOURCES.items():
        if name == "gsm_symbolic":
            held = list(gsm_symbolic(HELD_OUT_PROBLEMS, HELD_OUT_SEED))
            questions = {document["question"] for document in held}
            train = [each for each in gsm_symbolic(problems, TRAIN_SEED) if each["question"] not in questions]
        else:
            documents = list(python_docs() if name == "python_docs" else austen())
            held = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            ids = {document["id"] for document in held}
            train = [document for document in documents if document["id"] not in ids]
        parts = {
            part: write(directory / part / f"{name}.jsonl", own) for part, own in (("train", train), ("heldout", held))
        }
        manifest["sources"][name] = {"origin": origin, **parts}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def install(directory: Path) -> None:
    """Installs missing packages, and lets this process import them."""
    if not PYTHON_DOCS.is_dir() or not AUSTEN.is_dir():
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *DEBIAN_PACKAGES], check=True)
    packages = directory / "packages"
    if not packages.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
        subprocess.run([*pip, *PYPI_PACKAGES], check=True)
    sys.path.append(str(packages))  # last: they bring libraries that this process has already


def write(path: Path, documents: list[Document]) -> dict[str, Any]:
    """Writes documents; returns the file's entry in the manifest."""
    write_documents(path, documents)
    text = sum(len(text_of(document).encode()) for document in documents)
    return {"documents": len(documents), "text_bytes": text, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the demo model's corpus.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--problems", type=int, default=40_000, help="maths problems to train on")
    given = parser.parse_args()
    for name, source in prepare(given.directory, problems=given.problems)["sources"].items():
        train, held = (f"{source[part]['text_bytes']:,} bytes" for part in ("train", "heldout"))
        print(f"{name}: {train} to train on, {held} held out")


if __name__ == "__main__":
    main()
