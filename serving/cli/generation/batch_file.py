"""Batch inference from one JSON-lines file to another. Runs can be resumed, and an invalid line affects no other.

Lines have the project's own format or that of OpenAI's Batch files, with requests to the paths of `TEXT_APIS` and the
responses that a server gives; a file may mix both.

OpenAI's input: `{"custom_id", "method": "POST", "url", "body"}`.
Its output: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.tokenizer import Tokenizer
from serving.api.http.apis.text_api import TEXT_APIS, open_writer
from serving.api.http.connection.streaming import json_of
from serving.api.http.context import ResponseContext
from serving.api.http.errors import as_api_error, validated
from serving.api.http.generation import whole
from serving.api.http.parsing.call_formats import form_of
from serving.api.http.parsing.reasoning import reasoning_marks
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.engine.llm import LLM
from serving.engine.request_error import RequestError
from serving.engine.requests.output import RequestOutput, TokenLogprobs
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams

Key = str
"""An id as JSON text: 1 and "1" are different ids."""


@dataclass(frozen=True)
class Line:
    """One line of input; `fields` is an error message if the line cannot be used."""

    number: int
    id: Any
    fields: Mapping[str, Any] | str


class BatchRequest(NamedTuple):
    """The request of a line."""

    prompt: Any
    params: SamplingParams
    written: Callable[[RequestOutput], dict[str, Any]]
    """Returns the output line of the finished request."""


def is_batch_line(fields: Mapping[str, Any] | str) -> bool:
    """Returns whether a line of input is in OpenAI's format."""
    return isinstance(fields, Mapping) and "custom_id" in fields and "body" in fields


@dataclass
class BatchCounts:
    """Counts of a batch's lines."""

    total: int = 0
    skipped: int = 0
    """Lines with an answer that was already in the output."""
    done: int = 0
    failed: int = 0


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the input's lines, skipping blank ones. A line without an id gets its number, `"line-7"`."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            name = f"line-{number}"
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Line(number, name, f"not valid JSON: {error}")
                continue
            if not isinstance(value, dict):
                yield Line(number, name, f"must be a JSON object, got {type(value).__name__}")
                continue
            own_id = value.get("custom_id") if is_batch_line(value) else value.pop("id", None)
            yield Line(number, name if own_id is None else own_id, value)


def count_lines(path: Path) -> int:
    """Returns the number of lines to answer."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


class BatchLines:
    """Reads lines in OpenAI's format and writes the responses.

    Args:
        tokenizer: the model's tokenizer; None if it has none.
        model: the model's name in responses.
        defaults: sampling parameters for fields that lines omit.
        max_model_len: the model's maximum length.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, model: str, defaults: Mapping[str, Any], *, max_model_len: int
    ) -> None:
        self._context = ResponseContext(
            TextCodec(tokenizer, max_model_len), model, ServerSettings.create(default_sampling=defaults),
            tool_calls=form_of(tokenizer), reasoning=reasoning_marks(tokenizer),
        )  # fmt: skip

    def read(self, line: Line) -> BatchRequest:
        """Returns the request of a line.

        Raises:
            ApiError, RequestError, RequestValidationError: the line is invalid.
        """
        assert isinstance(line.fields, Mapping)
        fields = line.fields
        if fields.get("method", "POST") != "POST":
            raise RequestError(f"method must be POST, not {fields['method']!r}")
        url = fields.get("url")
        api = next((api for api in TEXT_APIS.values() if api.path == url), None)
        if api is None:
            paths = [api.path for api in TEXT_APIS.values()]
            raise RequestError(f"url must be one of {', '.join(paths)}, not {url!r}")
        writer = asyncio.run(open_writer(api, self._context, validated(api.request, fields["body"])))
        if len(writer.job.prompts) != 1:
            raise RequestError(f"a line must have one prompt, got {len(writer.job.prompts)}")

        def written(output: RequestOutput) -> dict[str, Any]:
            body = json.loads(json_of(writer.response(whole([output], writer.tally))))
            response = {"status_code": 200, "request_id": writer.job.id, "body": body}
            return {"id": _new_id(), "custom_id": line.id, "response": response, "error": None}

        return BatchRequest({"prompt_token_ids": writer.job.prompts[0]}, writer.job.params, written)

    def failed(self, line: Line, error: Exception) -> dict[str, Any]:
        """Returns the output line of a refused request."""
        refusal = as_api_error(error)
        fields = {"code": refusal.code or "invalid_request", "message": refusal.message}
        return {"id": _new_id(), "custom_id": line.id, "response": None, "error": fields}


class PlainLines:
    """Reads lines in the project's own format; `defaults` apply to fields that lines omit."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults

    def read(self, line: Line) -> BatchRequest:
        """Returns the request of a line.

        Raises:
            RequestError: the line is invalid.
        """
        if isinstance(line.fields, str):
            raise RequestError(line.fields)
        fields = dict(line.fields)
        if ("prompt" in fields) == ("prompt_token_ids" in fields):
            raise RequestError("give exactly one of 'prompt' and 'prompt_token_ids'")
        name = "prompt" if "prompt" in fields else "prompt_token_ids"
        prompt = {name: fields.pop(name)}
        params = SamplingParams(**{**self._defaults, **fields})
        return BatchRequest(prompt, params, lambda output: {"id": line.id, **as_json(output, params)})

    def failed(self, line: Line, error: Exception) -> dict[str, Any]:
        """Returns the output line of a refused request."""
        return {"id": line.id, "error": as_api_error(error).message}


def repair(path: Path) -> Counter[Key]:
    """Returns the ids answered in an earlier run. Removes an incomplete last line from the file."""
    if not path.exists():
        return Counter()
    done: Counter[Key] = Counter()
    with path.open("rb+") as file:
        good = 0
        for raw in file:
            try:
                value = json.loads(raw)
            except ValueError:
                value = None
            if not raw.endswith(b"\n") or not isinstance(value, dict) or "id" not in value:
                break
            done[_key(value)] += 1
            good += len(raw)
        rest = file.seek(0, os.SEEK_END) - good
        file.seek(good)
        if b"\n" in file.read().rstrip(b"\n"):
            raise RequestError(
                f"{path}: the {rest} bytes after the first {sum(done.values())} lines are not answers of a batch; the "
                "file was not changed"
            )
        file.truncate(good)
    return done


def _key(answer: Mapping[str, Any]) -> Key:
    """Returns the key of an output line: `custom_id` in OpenAI's format, where `id` is the response's id; otherwise
    `id`."""
    return json.dumps(answer["custom_id"] if "custom_id" in answer else answer["id"])


def run_batch(
    llm: LLM,
    source: Path,
    target: Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    progress: Callable[[BatchCounts], None] | None = None,
) -> BatchCounts:
    """Writes the answer to every line of `source` to `target` as it finishes, and finally sorts them in input order.

    Reads only a few more requests ahead than fit into a step, so files may have any length.

    Args:
        llm: the engine; its loop must be idle.
        source: JSON lines with `id`, `prompt` or `prompt_token_ids`, and any of `SamplingParams`.
        target: created, or continued after an interrupted run.
        defaults: sampling parameters for fields that lines omit.
        progress: called with the counts after each line.
    """
    answered = repair(target)
    counts = BatchCounts()
    waiting: dict[str, tuple[Line, Callable[[RequestOutput], dict[str, Any]]]] = {}
    order: list[Key] = []
    engine = llm.front
    ahead = 2 * llm.config.max_num_seqs * llm.config.data_parallel_size
    lines = read_lines(source)
    name, plain = Path(llm.config.model).name, PlainLines(defaults or {})
    openai = BatchLines(llm.tokenizer, name, defaults or {}, max_model_len=engine.max_model_len)
    # Without a buffer, closing the file does not repeat a failed write.
    with naming(target), target.open("ab", buffering=0) as out:

        def answer(value: dict[str, Any]) -> None:
            write_line(out, value)
            counts.done += 1
            counts.failed += value.get("error") is not None
            if progress is not None:
                progress(counts)

        def refuse(line: Line, error: Exception) -> None:
            answer((openai if is_batch_line(line.fields) else plain).failed(line, error))

        exhausted = False
        while not exhausted or waiting:
            while not exhausted and len(waiting) < ahead:
                line = next(lines, None)
                if line is None:
                    exhausted = True
                    break
                counts.total += 1
                key = json.dumps(line.id)
                order.append(key)
                if answered[key]:
                    answered[key] -= 1
                    counts.skipped += 1
                    continue
                request_id = f"line-{line.number}"
                try:
                    if has_half_characters([line.id, line.fields]):
                        raise RequestError("the line contains half a surrogate pair, which is not a character")
                    request = (openai if is_batch_line(line.fields) else plain).read(line)
                    engine.add(EngineRequest(request_id, request.prompt, request.params))
                except Exception as error:
                    # Even a bug, which is logged, affects only this line.
                    refuse(line, error)
                    continue
                waiting[request_id] = line, request.written
            for output in engine.step() if waiting else ():
                if output.finished:
                    line, written = waiting.pop(output.request_id)
                    if output.failure is not None:
                        refuse(line, output.failure)
                    else:
                        answer(written(output))
    with naming(target):
        _sort_like(target, order)
    return counts


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


def has_half_characters(value: Any) -> bool:
    """Returns whether a text contains half a surrogate pair, which JSON can escape but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def as_json(output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of an output line, without its id. With n > 1 there is a list of `choices`."""
    choices = []
    for choice in output.outputs:
        value: dict[str, Any] = {
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
        }
        if choice.logprobs is not None:
            value["logprobs"] = [top_pairs(table, params.logprobs or 0) for table in choice.logprobs]
        choices.append(value)
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    result = {**choices[0], "usage": usage}
    if len(choices) > 1:
        result["choices"] = choices
    if output.prompt_logprobs is not None:
        count = params.prompt_logprobs or 0
        result["prompt_logprobs"] = [None if t is None else top_pairs(t, count) for t in output.prompt_logprobs]
        if params.prompt_logprob_token_ids:
            result["prompt_logprobs_of_ids"] = [
                None if t is None else [[token, t[token].logprob] for token in params.prompt_logprob_token_ids]
                for t in output.prompt_logprobs
            ]
    return result


def top_pairs(table: TokenLogprobs, count: int) -> list[list[float]]:
    """Returns the `count` likeliest tokens as `[token_id, logprob]`, likeliest first; with 0 only the token itself."""
    pairs = list(table.items())
    if count == 0:
        return [[token, entry.logprob] for token, entry in pairs[:1]]
    ranked = sorted((entry.rank, token, entry.logprob) for token, entry in pairs if entry.rank is not None)
    return [[token, logprob] for _, token, logprob in ranked[:count]]


def _sort_like(path: Path, order: list[Key]) -> None:
    """Sorts the lines of a complete output into the input's order; lines not in the input go to the end."""
    lines: list[tuple[int, int]] = []  # where each line starts, and its length
    places: dict[Key, deque[int]] = {}
    with path.open("rb") as file:
        start = 0
        for index, raw in enumerate(file):
            lines.append((start, len(raw)))
            places.setdefault(_key(json.loads(raw)), deque()).append(index)
            start += len(raw)
    wanted = [places[key].popleft() for key in order if places.get(key)]
    known = set(wanted)
    wanted += [index for index in range(len(lines)) if index not in known]
    if wanted == sorted(wanted):
        return
    new = path.with_name(path.name + ".sorting")
    with path.open("rb") as file, new.open("wb") as out:
        for index in wanted:
            start, length = lines[index]
            file.seek(start)
            out.write(file.read(length))
    os.replace(new, path)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
