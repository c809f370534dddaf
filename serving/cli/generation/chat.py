"""`mamba-jax chat`: a conversation in the terminal, with a model in this process or on a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli.jax_import import import_jax
from serving.cli.options import Options, with_options
from serving.cli.terminal import printable
from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

_HELP = "/reset starts over, /exit (or Ctrl-D) quits"


@dataclass
class AnswerStats:
    """Token counts of one answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        text = f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached; {self.completion_tokens} new"
        if self.drafted:
            text += f"; {self.accepted} of {self.drafted} drafts accepted"
        return text


Messages = list[dict[str, str]]
Responder = Callable[[Messages, AnswerStats], Iterator[str]]
"""Yields pieces of the answer to a conversation, and fills in the stats."""


@with_options(Options("flags", EngineConfig, "Engine"), config_file=True)
def chat(
    *,
    url: Annotated[
        str | None,
        typer.Option(help="URL of a running server to use, e.g. http://127.0.0.1:8000, instead of loading a model."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's API key.", envvar="MAMBA_JAX_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    flags: dict[str, Any],
) -> None:
    """Chat with a model in the terminal. Each answer reports what prefix caching and drafts saved."""
    sampling = {"max_tokens": max_tokens, **({} if temperature is None else {"temperature": temperature})}
    from rich.console import Console

    console = Console(highlight=False)
    answer = remote(url, api_key, sampling) if url is not None else local(flags, sampling)
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    console.print(_HELP, style="dim")
    converse(console, answer, beginning)


def converse(console: Console, answer: Responder, beginning: Messages, ask: Callable[[], str] | None = None) -> None:
    """Reads questions and prints answers until input ends. Reports failed requests. `ask` is for tests."""
    messages = list(beginning)
    while True:
        try:
            question = (ask or (lambda: console.input("[bold green]you[/] ")))().strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            messages = list(beginning)
            console.print("a new conversation", style="dim")
        if not question or question.startswith("/"):
            if question not in ("", "/reset"):
                console.print(_HELP, style="dim")
            continue
        messages.append({"role": "user", "content": question})
        stats, pieces = AnswerStats(), []
        console.print("[bold cyan]model[/] ", end="")
        try:
            for piece in answer(messages, stats):
                pieces.append(piece)
                console.print(printable(piece), end="", markup=False, soft_wrap=True)
            console.print()
            console.print(str(stats), style="dim")
        except KeyboardInterrupt:
            console.print("\nstopped", style="dim")
        except (ConfigError, RequestError) as error:
            console.print(f"\nerror: {printable(str(error))}", style="red", markup=False, soft_wrap=True)
            messages.pop()  # the user can ask the question again
            continue
        messages.append({"role": "assistant", "content": "".join(pieces)})


def local(flags: dict[str, Any], sampling: dict[str, Any]) -> Responder:
    """Returns a function that answers with a model in this process."""
    import_jax(flags.get("memory_utilization"))
    from serving.engine.assembly.fetch import fetched, tokenizer_of
    from serving.engine.llm import LLM

    flags.setdefault("max_num_seqs", 1)
    flags.setdefault("warmup", False)
    config = fetched(EngineConfig.create(**flags))
    params = SamplingParams(**sampling)
    if not tokenizer_of(config).has_chat_template:
        raise ConfigError(f"{config.model} has no chat template; use `mamba-jax generate` for plain text")
    llm = LLM(**flags)

    def answer(messages: Messages, stats: AnswerStats) -> Iterator[str]:
        shown = 0
        for output in llm.stream({"prompt_token_ids": llm.encode_chat(messages)}, params):
            text = output.outputs[0].text
            yield text[shown:]
            shown = len(text)
            stats.prompt_tokens, stats.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
            stats.completion_tokens = len(output.outputs[0].token_ids)
            if output.metrics is not None:
                stats.drafted, stats.accepted = output.metrics.drafts.drafted, output.metrics.drafts.accepted

    return answer


def remote(url: str, api_key: str | None, sampling: dict[str, Any]) -> Responder:
    """Returns a function that answers through a server with OpenAI's API."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=None)

    def answer(messages: Messages, stats: AnswerStats) -> Iterator[str]:
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ConfigError(f"{url}: {_error(response.read())}")
                yield from _pieces(response.iter_lines(), stats)
        except httpx.HTTPError as error:
            raise ConfigError(f"{url}: {error}") from None

    return answer


def _pieces(lines: Iterator[str], stats: AnswerStats) -> Iterator[str]:
    """Yields the texts in a stream's events."""
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        try:
            event = json.loads(line[6:])
            if "error" in event:
                raise ConfigError(str(event["error"]["message"]))
            if event.get("usage"):
                _read_usage(event["usage"], stats)
            texts = [str(choice["delta"].get("content") or "") for choice in event["choices"]]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the server sent an invalid event: {line[:80]}") from None
        yield from filter(None, texts)


def _read_usage(usage: dict[str, Any], stats: AnswerStats) -> None:
    stats.prompt_tokens, stats.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    details = usage.get("completion_tokens_details") or {}
    stats.accepted = details.get("accepted_prediction_tokens", 0)
    stats.drafted = stats.accepted + details.get("rejected_prediction_tokens", 0)


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "the server sent an error that is not JSON"
