"""Batch inference from one JSON-lines file to another. Runs can be resumed, and an invalid line affects no other.

Lines have the project's own format or that of OpenAI's Batch files, with requests to the paths of `TEXT_APIS` and the
responses that a server gives; a file may mix both.

OpenAI's input: `{"custom_id", "method": "POST", "url", "body"}`.
Its output: `{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`.
Every line of output also has the digest of its line of input (`batch_output`).
"""

from __future__ import annotations

import asyncio
import codecs
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.text_api import TEXT_APIS, open_writer
from serving.api.http.connection.streaming import json_of
from serving.api.http.context import ResponseContext
from serving.api.http.errors import as_api_error, validated
from serving.api.http.generation import whole
from serving.api.http.json_values import has_half_characters
from serving.api.http.parsing.formats import form_of, reasoning_marks
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.cli.generation import batch_output
from serving.cli.generation.batch_output import LineKey, line_key, naming, write_line
from serving.core.errors import RequestError
from serving.engine.llm import LLM
from serving.engine.requests.output import RequestOutput, TokenLogprobs
from serving.engine.requests.request import EngineRequest, read_marks
from serving.engine.requests.sampling_params import SamplingParams

PROMPTS = ("prompt", "prompt_token_ids", "messages")
CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs")


@dataclass(frozen=True)
class Line:
    """One line of input; `fields` is an error message if the line cannot be used."""

    number: int
    id: Any
    fields: Mapping[str, Any] | str
    text: bytes


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
    """Of the lines answered by this run; when it has ended, of all lines."""
    tokens: int = 0
    """Output tokens of this run."""
    seconds: float = 0.0


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the input's lines, skipping blank ones and the mark of UTF-8 that some editors write before the first. A
    line without an id gets its number, `"line-7"`."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not text.strip():
                continue
            name: Any = f"line-{number}"
            fields: Any
            try:
                fields = json.loads(text.decode())
            except (ValueError, RecursionError) as error:
                fields = f"not valid JSON: {error}"
            else:
                if isinstance(fields, dict):
                    own_id = fields.get("custom_id") if is_batch_line(fields) else fields.pop("id", None)
                    name = name if own_id is None else own_id
                else:
                    fields = f"must be a JSON object, got {type(fields).__name__}"
            yield Line(number, name, fields, text)


class BatchLines:
    """Reads lines, and writes what was refused; `defaults` apply to sampling parameters that lines in the project's own
    format omit."""

    def __init__(self, context: ResponseContext, defaults: Mapping[str, Any]) -> None:
        self._context, self._defaults = context, defaults

    def read(self, line: Line) -> BatchRequest:
        """Returns the request of a line.

        Raises:
            ApiError, RequestError, RequestValidationError: the line is invalid.
        """
        return self._openai(line) if is_batch_line(line.fields) else self._plain(line)

    def failed(self, line: Line, error: Exception) -> dict[str, Any]:
        """Returns the output line of a refused request."""
        refusal = as_api_error(error)
        if not is_batch_line(line.fields):
            return {"id": line.id, "error": refusal.message}
        fields = {"code": refusal.code or "invalid_request", "message": refusal.message}
        return {"id": _new_id(), "custom_id": line.id, "response": None, "error": fields}

    def _openai(self, line: Line) -> BatchRequest:
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
            body = json.loads(json_of(writer.response(whole([output], writer.job))))
            response = {"status_code": 200, "request_id": writer.job.request.request_id, "body": body}
            return {"id": _new_id(), "custom_id": line.id, "response": response, "error": None}

        prompt = {"prompt_token_ids": writer.job.prompts[0], "cache_marks": writer.job.request.cache_marks}
        return BatchRequest(prompt, writer.job.request.params, written)

    def _plain(self, line: Line) -> BatchRequest:
        if isinstance(line.fields, str):
            raise RequestError(line.fields)
        fields = dict(line.fields)
        given = [name for name in PROMPTS if name in fields]
        if len(given) != 1:
            raise RequestError("give exactly one of 'prompt', 'prompt_token_ids' and 'messages'")
        if given == ["messages"]:
            chat = {name: fields.pop(name) for name in CHAT_FIELDS if name in fields}
            request: Any = validated(TEXT_APIS["chat/completions"].request, {"model": self._context.model, **chat})
            (ids,), marks = asyncio.run(tokenized(self._context, request))
            prompt: dict[str, Any] = {"prompt_token_ids": ids}
        else:
            prompt, marks = {given[0]: fields.pop(given[0])}, ()
        prompt["cache_marks"] = read_marks(fields.pop("cache_marks", None)) or marks
        params = SamplingParams(**{**self._defaults, **fields})
        return BatchRequest(prompt, params, lambda output: {"id": line.id, **as_json(output, params)})


def run_batch(
    llm: LLM,
    source: Path,
    target: Path,
    *,
    defaults: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Callable[[BatchCounts], None] | None = None,
) -> BatchCounts:
    """Writes the answer to every line of `source` to `target` as it finishes, and finally sorts them in input order.

    Reads only a few more requests ahead than fit into a step, so files may have any length.

    Args:
        llm: the engine; its loop must be idle.
        source: JSON lines with `id`; `prompt`, `prompt_token_ids` or `messages`; `cache_marks`; and any of
            `SamplingParams`.
        target: created, or continued after an interrupted run.
        defaults: sampling parameters for fields that lines omit.
        overwrite: answer every line, and remove the answers of earlier runs.
        retry_failed: answer again the lines that failed.
        progress: called with the counts after each line.

    Raises:
        ConfigError: `target` is not the output of a batch, or has answers to lines that have changed since.
    """
    defaults = defaults or {}
    keys = {line_key(line.id, line.text, defaults) for line in read_lines(source)}
    prepared = partial(batch_output.prepare, target, keys, overwrite=overwrite, retry_failed=retry_failed)
    counts, begin = BatchCounts(), time.monotonic()
    waiting: dict[str, tuple[Line, LineKey, Callable[[RequestOutput], dict[str, Any]]]] = {}
    order: list[LineKey] = []
    engine = llm.front
    ahead = 2 * llm.config.max_num_seqs * llm.config.data_parallel_size
    lines = read_lines(source)
    context = ResponseContext(
        TextCodec(llm.tokenizer, llm.engine.max_model_len), Path(llm.config.model).name,
        ServerSettings.create(default_sampling=defaults), tool_calls=form_of(llm.tokenizer),
        reasoning=reasoning_marks(llm.tokenizer), marks=llm.engine.loop.scheduler.config.caching,
    )  # fmt: skip
    reader = BatchLines(context, defaults)
    with naming(target), batch_output.opened(target, prepared) as (out, answered):

        def answer(key: LineKey, value: dict[str, Any]) -> None:
            write_line(out, value | {batch_output.DIGEST: key.digest})
            counts.done += 1
            counts.failed += value.get("error") is not None
            counts.seconds = time.monotonic() - begin
            if progress is not None:
                progress(counts)

        def refuse(line: Line, key: LineKey, error: Exception) -> None:
            answer(key, reader.failed(line, error))

        exhausted = False
        while not exhausted or waiting:
            while not exhausted and len(waiting) < ahead:
                line = next(lines, None)
                if line is None:
                    exhausted = True
                    break
                counts.total += 1
                key = line_key(line.id, line.text, defaults)
                order.append(key)
                if answered[key]:
                    answered[key] -= 1
                    counts.skipped += 1
                    continue
                request_id = f"line-{line.number}"
                try:
                    if has_half_characters([line.id, line.fields]):
                        raise RequestError("the line contains half a surrogate pair, which is not a character")
                    request = reader.read(line)
                    marks = request.prompt.get("cache_marks", ())
                    engine.add(EngineRequest(request_id, request.prompt, request.params, cache_marks=marks))
                except Exception as error:
                    # Even a bug, which is logged, affects only this line.
                    refuse(line, key, error)
                    continue
                waiting[request_id] = line, key, request.written
            for output in engine.step() if waiting else ():
                if output.finished:
                    line, key, written = waiting.pop(output.request_id)
                    if output.failure is not None:
                        refuse(line, key, output.failure)
                    else:
                        counts.tokens += sum(len(choice.token_ids) for choice in output.outputs)
                        answer(key, written(output))
        counts.failed = batch_output.sort_like(target, order)
    return counts


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


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
