"""The output file of a batch: recognized, continued after an interruption, and sorted like the input.

A file is changed only if every complete line is an answer of a batch. The last line may lack its newline, because a run
was interrupted while writing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from serving.api.http.json_values import has_half_characters
from serving.config import ConfigError

T = TypeVar("T")

DIGEST = "input_digest"
_BEGINNING = b'{"id": '
_PLAIN = {"id", "text", "token_ids", "finish_reason", "usage", DIGEST}
_OPENAI = {"id", "custom_id", "response", "error", DIGEST}


class LineKey(NamedTuple):
    """Identifies a line of input."""

    id: str
    """The id as JSON text: 1 and "1" are different ids."""
    digest: str
    """Of the line and the command's sampling options."""


def line_key(id: Any, text: bytes, defaults: Mapping[str, Any]) -> LineKey:
    """Returns the key of a line of input."""
    options = json.dumps(defaults, sort_keys=True).encode()
    return LineKey(json.dumps(id), hashlib.sha256(text.strip() + b"\n" + options).hexdigest()[:16])


@dataclass(frozen=True)
class Answer:
    """A line of the output file."""

    key: LineKey
    failed: bool
    start: int
    size: int


def read_answers(path: Path) -> list[Answer]:
    """Returns the complete lines of an output file; none if there is no file.

    Raises:
        ConfigError: the file is not the output of a batch.
    """
    if not path.exists():
        return []
    answers: list[Answer] = []
    start = 0
    with path.open("rb") as file:
        for raw in file:
            value = None
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(raw)
            answer = _answer(value, start, len(raw))
            interrupted = value is None and (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw))
            if raw.endswith(b"\n") and answer is not None:
                answers.append(answer)
                start += len(raw)
            elif raw.endswith(b"\n") or not (interrupted or answer is not None):
                raise ConfigError(
                    f"--output {path}: the text from byte {start} on is not the output of a batch; the file was not "
                    "changed, give another file"
                )
    return answers


def _answer(value: Any, start: int, size: int) -> Answer | None:
    """Returns the answer that a line is; None if it is not the output of a batch."""
    if not isinstance(value, dict):
        return None
    failure = value.keys() == {"id", "error", DIGEST} and isinstance(value["error"], str)
    openai = value.keys() == _OPENAI and str(value["id"]).startswith("batch_req_")
    if not (failure or openai or value.keys() >= _PLAIN):
        return None
    # In OpenAI's format, `id` is that of the response.
    key = LineKey(json.dumps(value["custom_id" if openai else "id"]), str(value[DIGEST]))
    return Answer(key, value.get("error") is not None, start, size)


def prepare(
    path: Path, lines: Iterable[LineKey], *, overwrite: bool = False, retry_failed: bool = False
) -> Counter[LineKey]:
    """Removes from an output file what is to be answered again, and an incomplete last line.

    Args:
        path: the output file.
        lines: those of the input.
        overwrite: remove all answers.
        retry_failed: remove the answers of lines that failed. Those whose line has changed since are always removed.

    Returns:
        The answers that remain, by line.

    Raises:
        ConfigError: the file is not the output of a batch, or has answers to lines that have changed since.
    """
    answers = read_answers(path)
    known = set(lines)
    ids = {key.id for key in known}
    remaining: list[Answer] = []
    for answer in [] if overwrite else answers:
        changed = answer.key not in known and answer.key.id in ids
        if answer.failed and (retry_failed or changed):
            continue
        if changed:
            raise ConfigError(
                f"--output {path}: the answer to line {answer.key.id} is to another line or to other sampling options; "
                "use --overwrite to answer all lines again, or another --output"
            )
        remaining.append(answer)
    if len(remaining) < len(answers):
        _rewrite(path, remaining)
    elif path.exists():
        os.truncate(path, sum(answer.size for answer in answers))
    return Counter(answer.key for answer in remaining)


def sort_like(path: Path, order: Sequence[LineKey]) -> int:
    """Sorts a complete output into the input's order; lines not in the input go to the end. Returns the number of lines
    that failed."""
    answers = read_answers(path)
    places: dict[LineKey, deque[int]] = defaultdict(deque)
    for index, answer in enumerate(answers):
        places[answer.key].append(index)
    wanted = [places[key].popleft() for key in order if places[key]]
    failed = sum(answers[index].failed for index in wanted)
    wanted += sorted({*range(len(answers))} - {*wanted})
    if wanted != sorted(wanted):
        _rewrite(path, [answers[index] for index in wanted])
    return failed


def _rewrite(path: Path, answers: Iterable[Answer]) -> None:
    """Replaces the file by one of these lines."""
    path = path.resolve()
    with path.open("rb") as file, tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as out:
        try:
            for answer in answers:
                file.seek(answer.start)
                out.write(file.read(answer.size))
            out.flush()
            shutil.copymode(path, out.name)
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise


@contextlib.contextmanager
def opened(path: Path, prepared: Callable[[], T]) -> Iterator[tuple[RawIOBase, T]]:
    """Opens an output file for this run alone, without a buffer: then closing it does not repeat a failed write.

    `prepared` runs while no other run may write. It is called again if the file was replaced, by itself or another run.

    Raises:
        ConfigError: another run has it open.
    """
    while True:
        with path.open("ab", buffering=0) as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"--output {path}: another run writes to it; wait, or give another file") from None
            except OSError:
                pass  # a file system without locks
            result = prepared()
            if os.path.samestat(os.fstat(out.fileno()), path.stat()):
                yield out, result
                return


def write_line(out: RawIOBase, value: Any) -> None:
    """Writes one complete line of JSON."""
    left = memoryview(json.dumps(value, ensure_ascii=has_half_characters(value)).encode() + b"\n")
    while left:
        left = left[out.write(left) or 0 :]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to errors of the system, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
