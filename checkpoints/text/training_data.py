"""A corpus as streams of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.tokenizer import Tokenizer
from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import DataSettings
from mamba_jax.train.corpus import Document, read_documents, text_of
from mamba_jax.train.data import TokenStream

_AT_ONCE = 1000  # documents


def load_streams(
    corpus: Path, tokenizer: Tokenizer, settings: DataSettings, *, part: str = "train"
) -> dict[str, TokenStream]:
    """Returns the documents of each source, tokenized; every document ends with the eos token.

    Args:
        corpus: a directory with `train/SOURCE.jsonl`, or one .jsonl file.
        tokenizer: of the model to be trained.
        settings: which sources are aligned, and how many problems are put in the chat template.
        part: the folder of the corpus that is read: `train` or `heldout`.
    Raises:
        CheckpointError: there is no such corpus.
    """
    return {
        file.stem: TokenStream.of(
            encoded(read_documents(file), tokenizer, settings.chat_share), aligned=file.stem in settings.aligned
        )
        for file in _files(corpus, part)
    }


def corpus_digest(corpus: Path) -> str:
    """SHA-256 over names and contents of the training documents' files.

    Raises:
        CheckpointError: there is no such corpus, or it cannot be read.
    """
    digest = hashlib.sha256()
    for file in _files(corpus):
        try:
            with file.open("rb") as content:
                digest.update(f"{file.name}\n{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def check_sources(corpus: Path, settings: DataSettings) -> None:
    """Checks what the settings say about a corpus, before it is tokenized.

    Raises:
        CheckpointError: there is no such corpus, or no such validation data.
        ModelConfigError: the corpus lacks a source that the settings name.
    """
    names = [file.stem for file in _files(corpus)]
    for setting, sources in (("mixture", settings.mixture), ("aligned", settings.aligned)):
        if unknown := sorted(set(sources) - set(names)):
            raise ModelConfigError(f"data.{setting} has {unknown[0]!r}; the corpus has {', '.join(names)}")
    if settings.validation:
        _files(Path(settings.validation), "heldout")


def _files(corpus: Path, part: str = "train") -> list[Path]:
    files = [corpus] if corpus.is_file() else sorted((corpus / part).glob("*.jsonl"))
    if not files and part != "train":
        raise CheckpointError(f"{corpus}: no validation data; give a .jsonl file or a folder with {part}/SOURCE.jsonl")
    if not files:
        raise CheckpointError(f"{corpus}: no corpus; create one with `python -m mamba_jax.train.corpus {corpus}`")
    return files


def shares_of(streams: Mapping[str, TokenStream], settings: DataSettings) -> dict[str, float]:
    """Returns each source's share of the sequences: as set, or else by size."""
    return settings.mixture or {name: float(len(stream.tokens)) for name, stream in streams.items()}


def encoded(documents: Iterator[Document], tokenizer: Tokenizer, chat_share: float = 0.0) -> Iterator[list[int]]:
    """The token ids of each document, with what begins and ends it.

    `chat_share` of the problems, evenly spread, are put in the chat template.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    waiting: list[str] = []
    chats = 0.0
    for document in documents:
        if "question" in document:
            chats += chat_share
            if chats >= 1:
                chats -= 1
                turns = zip(("user", "assistant"), (document["question"], document["answer"]), strict=True)
                chat = [{"role": role, "content": text} for role, text in turns]
                yield tokenizer.encode_chat(chat, add_generation_prompt=False) + end
                continue
        waiting.append(text_of(document))
        if len(waiting) == _AT_ONCE:
            yield from (ids + end for ids in tokenizer.encode_batch(waiting))
            waiting = []
    yield from (ids + end for ids in tokenizer.encode_batch(waiting))
