"""Documents of a corpus: reading them, their text, and a sample of what is held out.

A corpus is a directory with `train/SOURCE.jsonl` and perhaps `heldout/SOURCE.jsonl`, one document a line:
`{"id", "text"}`, or `{"id", "question", "answer", "result"}`. `benchmarks/demo_corpus.py` makes that of the demo model.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mamba_jax.config import ModelConfigError

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


def write_sample(corpus: Path, directory: Path) -> None:
    """Writes a small part of the held-out data to a model's directory, to evaluate it without the corpus.

    Args:
        corpus: a directory with `heldout/SOURCE.jsonl`.
        directory: receives `heldout_problems.jsonl`, the first 200 problems, and `heldout_text.jsonl`: of each source
            the beginnings of 10 documents, spread evenly.
    """
    pieces: list[Document] = []
    for path in sorted((corpus / "heldout").glob("*.jsonl")):
        documents = list(read_documents(path))
        if "question" in documents[0]:
            write_documents(directory / SAMPLE_PROBLEMS, documents[:200])
            continue
        for document in documents[:: -(-len(documents) // 10)]:
            start = document["text"][:_PIECE]
            pieces.append({"id": f"{path.stem}:{document['id']}", "text": start[: start.rfind("\n") + 1] or start})
    write_documents(directory / SAMPLE_TEXT, pieces)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """Writes documents to a .jsonl file; creates its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in documents), encoding="utf-8")
