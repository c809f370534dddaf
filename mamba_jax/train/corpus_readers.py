"""Read the packages that contain the corpus, and print one document per line as JSON.

Run as a file, by a Python that finds `rdata` and `reasoning_gym`; so it imports nothing of this project. See `corpus`.

    python corpus_readers.py python_docs | austen | gsm_symbolic COUNT SEED
"""

import json
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

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


def main(name: str, *numbers: str) -> None:
    """Print the documents of one source."""
    readers: dict[str, Callable[..., Iterator[dict[str, str]]]] = {
        "python_docs": python_docs,
        "austen": austen,
        "gsm_symbolic": gsm_symbolic,
    }
    for document in readers[name](*map(int, numbers)):
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
