"""A corpus as streams of tokens, and training of a small byte-level BPE on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from checkpoints.errors import CheckpointError
from checkpoints.json_file import reading
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
        with reading(file), file.open("rb") as content:
            digest.update(f"{file.name}\n{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
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
        raise CheckpointError(f"{corpus}: no corpus; give a .jsonl file or a folder with train/SOURCE.jsonl")
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
        if "text" not in document:
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


PAD, BOS, EOS, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
"""The entries 0 to 4."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MOST_CHARACTERS = 6_000_000  # of one source: problems made from templates would otherwise fill the vocabulary


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE that can spell any text, keeps digits apart and begins every prompt with the bos token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def corpus_texts(corpus: Path) -> Iterator[str]:
    """The training documents of a corpus, of each source the first few million characters."""
    for path in sorted((corpus / "train").glob("*.jsonl")):
        left = _MOST_CHARACTERS
        for document in read_documents(path):
            text = text_of(document)
            yield text
            left -= len(text)
            if left <= 0:
                break


def write_tokenizer(corpus: Path, directory: Path, vocab_size: int) -> None:
    """Trains on a corpus, and writes tokenizer.json, tokenizer_config.json (with the chat template) and
    generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(corpus_texts(corpus), vocab_size).save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": 8192,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    ends = [SPECIAL_TOKENS.index(token) for token in (EOS, TURN_END)]
    generation = {"bos_token_id": SPECIAL_TOKENS.index(BOS), "eos_token_id": ends, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")
