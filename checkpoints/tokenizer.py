"""Converts text to token ids and back, by the files of a checkpoint's tokenizer."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints.errors import CheckpointError, one_line
from checkpoints.json_file import open_regular, read_json_if_present, read_text
from checkpoints.resolve import resolve
from checkpoints.text.chat import ChatTemplates, Message
from checkpoints.text.stream import StreamDecoder, continued, following_text
from checkpoints.text.tokenizer_files import (
    LETTERS,
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
    VOCABULARY_FILE,
    byte_letters,
    class_of,
    read_sentencepiece,
    read_tiktoken,
    read_tokenizer_json,
    read_vocabulary,
)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    VOCABULARY_FILE,
    "merges.txt",
    SENTENCEPIECE_FILE,
    TIKTOKEN_FILE,
    "chat_template.jinja",
    "chat_template.json",
)
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates with other names than `default`."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FIRST_LINE = 4096
_BYTES = {letter: byte for byte, letter in byte_letters().items()}
"""The byte of each letter in the tokens of byte-level tokenizers."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        backend: the tokenizer of the `tokenizers` package.
        special_tokens: text of `bos_token`, `eos_token`, ... if known.
        chat_templates: template texts by name (`default`, `tool_use`, ...).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        """Text of the special tokens by role, for example `{"eos_token": "</s>"}`."""
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_id = self._role_id("eos_token")
        self.pad_token_id = self._role_id("pad_token")
        roles = (self._role_id(role) for role in self.special_tokens)
        added = (i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.special_ids = frozenset(added) | {i for i in roles if i is not None}
        """Ids that `decode` leaves out."""
        self.chat_templates = dict(chat_templates or {})
        """Texts of the chat templates by name."""
        self._chat = ChatTemplates(self.chat_templates, self.special_tokens)

    def with_chat_template(self, template: str) -> Tokenizer:
        """Returns the same tokenizer with this template in place of all its templates."""
        return Tokenizer(self._backend, self.special_tokens, {"default": template})

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included. The model's own vocabulary is often padded beyond this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest entry. No token represents a longer text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a template from the caller."""
        return bool(self.chat_templates)

    def chat_template_mentions(self, text: str) -> bool:
        """Returns whether the chat template has this text in it: models write calls of tools as their template does."""
        return any(text in source for source in self.chat_templates.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids of `text`, by default with the checkpoint's special tokens at the start (and end)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Returns token ids of `text` without added special tokens, and where each token ends, in characters."""
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return encoding.ids, [end for _, end in encoding.offsets]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes many texts in parallel. Unlike `encode`, this lets other Python threads run meanwhile."""
        return [e.ids for e in self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns text of `ids`. Ids beyond the vocabulary give no text."""
        ids = [int(i) for i in ids]
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        # A batch of one: other Python threads can run during the call.
        return self._backend.decode_batch([ids], skip_special_tokens=False)[0]

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """Returns a decoder for tokens that arrive a few at a time; see `StreamDecoder`."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        return StreamDecoder(lambda ids: self._backend.decode(list(ids), skip_special_tokens=False), skip)

    def to_json(self) -> str:
        """Returns the text of a `tokenizer.json`, for libraries that parse it themselves."""
        return self._backend.to_str()

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of an entry, spelled as in the vocabulary."""
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """Returns a single token as text, special tokens and a space at its start included; part of a character is
        U+FFFD."""
        text, token = self._backend.decode([token_id], skip_special_tokens=False), self._backend.id_to_token(token_id)
        if (token or "").startswith("▁") and not text.startswith("▁"):
            # Decoders drop the first space of a text: only the second of two tokens is whole.
            text = self._backend.decode([token_id, token_id], skip_special_tokens=False)[len(text) :]
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a single token, also of a part of a character; None if they are unknown."""
        text, token = self.token_text(token_id), self._backend.id_to_token(token_id) or ""
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return bytes(map(_BYTES.__getitem__, token)) if token and _BYTES.keys() >= set(token) else None

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Returns the text of a conversation, special tokens included: encode it with `add_special_tokens=False`.

        Args:
            messages: OpenAI-style messages.
            tools: functions the model may call.
            chat_template: a name among the checkpoint's templates, or a template's own text.
            add_generation_prompt: end with the beginning of the assistant's turn.
            **variables: passed on to the template.
        Raises:
            ChatTemplateError: the template does not exist, or it rejects the conversation.
        """
        template = self._chat.choose(chat_template, tools=bool(tools))
        return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(
        self, messages: Sequence[Message], /, *, previous_token_ids: Sequence[int] = (), **options: Any
    ) -> list[int]:
        """Returns token ids of a conversation.

        Args:
            messages: OpenAI-style messages.
            previous_token_ids: the earlier turns, a prompt and its answer; `messages` are then those that follow.
            **options: those of `apply_chat_template`.
        Raises:
            ChatTemplateError: the template does not exist, or it rejects the conversation.
        """
        if not previous_token_ids:
            return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)
        text = following_text(self.apply_chat_template, messages, **options)
        return continued(previous_token_ids, self.encode(text, add_special_tokens=False))

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """Returns the tokenizer of a directory, or None where there is none.

    It is that of `tokenizer.json`, else of `tiktoken.model`, else of `tokenizer.model`: SentencePiece's, or tiktoken's
    under that name; else of `vocab.json` and `merges.txt`. One of another form counts as none. Tokens that only
    `tokenizer_config.json` or `added_tokens.json` has are added.

    Raises:
        CheckpointError: a file is there but broken.
    """
    settings = read_json_if_present(directory / "tokenizer_config.json")
    older = read_json_if_present(directory / "added_tokens.json").items()
    added = {"added_tokens_decoder": {str(token_id): {"content": text} for text, token_id in older}, **settings}
    names = "tokenizer.json", TIKTOKEN_FILE, SENTENCEPIECE_FILE, VOCABULARY_FILE
    path = next((file for name in names if (file := directory / name).is_file()), None)
    read = None if path is None else _reader(path, settings)
    if path is None or read is None:
        return None
    try:
        backend = read(path, added)
    except CheckpointError:
        raise
    except Exception as error:  # the package raises bare Exception; a file can hold anything
        raise CheckpointError(f"{path}: not a usable tokenizer ({one_line(error)})") from error
    # Truncation and padding are for training batches; a server must neither truncate nor pad prompts.
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, _special_tokens(directory, settings, backend), _chat_templates(directory, settings))


def _reader(
    path: Path, settings: Mapping[str, Any]
) -> Callable[[Path, Mapping[str, Any]], tokenizers.Tokenizer] | None:
    """Returns the reader of a tokenizer's file; None if it is of none of the known forms."""
    if path.name == "tokenizer.json":
        return read_tokenizer_json
    if path.name == VOCABULARY_FILE:
        return read_vocabulary if class_of(settings) in LETTERS else None
    with open_regular(path) as file:
        start = file.read(_FIRST_LINE)
    if path.name == TIKTOKEN_FILE or re.match(rb"([A-Za-z0-9+/=]{4})+ \d+\s", start):
        return read_tiktoken
    return read_sentencepiece if start.startswith(b"\n") else None  # the key of its first field


def _special_tokens(directory: Path, settings: dict[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Returns texts by role. The first file that defines a role decides; older files come later."""
    found: dict[str, str] = {}
    for source in (settings, read_json_if_present(directory / "special_tokens_map.json")):
        for role in _SPECIAL:
            value = source.get(role)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found.setdefault(role, text)
    for source in (read_json_if_present(directory / name) for name in ("generation_config.json", "config.json")):
        for role in _SPECIAL:
            value = source.get(f"{role}_id")
            text = backend.id_to_token(value) if isinstance(value, int) and value >= 0 else None
            if text is not None:
                found.setdefault(role, text)
    return found


def _chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Templates by name, from `chat_template.jinja` (and its neighbors), or from a field of a JSON file."""
    older = read_json_if_present(directory / "chat_template.json")
    stored = settings.get("chat_template") or older.get("chat_template")
    if isinstance(stored, list):
        named = [(each.get("name"), each.get("template")) for each in stored if isinstance(each, Mapping)]
    else:
        named = [*stored.items()] if isinstance(stored, Mapping) else [("default", stored)]
    found = {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    more = directory / MORE_TEMPLATES
    files = {path.stem: path for path in sorted(more.glob("*.jinja"))} | {"default": directory / "chat_template.jinja"}
    for name, path in files.items():
        if path.is_file():
            found[name] = read_text(path)
    return found


def load_tokenizer(ref: str | Path, *, chat_template: str | None = None) -> Tokenizer | None:
    """Returns the tokenizer that belongs to a model, or None where there is none (published sizes, bare checkpoints).

    Args:
        ref: as for `load_model`.
        chat_template: a file with a template, or a template's own text, in place of the checkpoint's.
    Raises:
        CheckpointError: see `resolve`; or a file that is there but broken, or not there.
    """
    directory = resolve(ref).directory
    tokenizer = None if directory is None else read_tokenizer(directory)
    if tokenizer is None or chat_template is None:
        return tokenizer
    if "{{" not in chat_template and "{%" not in chat_template:
        try:
            chat_template = read_text(Path(chat_template).expanduser())
        except CheckpointError as error:
            raise CheckpointError(f"chat template {error}") from None
    return tokenizer.with_chat_template(chat_template)


def require_tokenizer(ref: str | Path, *, chat_template: str | None = None) -> Tokenizer:
    """Loads a tokenizer like `load_tokenizer`, but requires one.

    Raises:
        CheckpointError: the model has no tokenizer.
    """
    tokenizer = load_tokenizer(ref, chat_template=chat_template)
    if tokenizer is None:
        raise CheckpointError(
            f"{ref}: has no tokenizer.json, {TIKTOKEN_FILE} or {SENTENCEPIECE_FILE}, nor a {VOCABULARY_FILE} of a "
            "known class, so text cannot be used; give token ids instead"
        )
    return tokenizer
