"""Readers of tokenizers: `tokenizer.json`, `tiktoken.model`, SentencePiece's `tokenizer.model`, and `vocab.json` with
`merges.txt`. They raise any exception for a file that they cannot use."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.json_file import open_regular

TIKTOKEN_FILE = "tiktoken.model"
_MOST_CHARACTERS = 4096
"""Maximum length of a piece: finding its merges takes quadratic time."""
MOST_ADDED = 1 << 16
"""Maximum number of ids above the vocabulary: gaps between added tokens are filled."""
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_PATTERN = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Reads a tokenizer of Kimi's form. Each line has a token's bytes in base64, and its rank.

    Texts are first split by a regular expression, which is part of the repository's code and not of the file.

    Args:
        path: the file.
        settings: tokenizer_config.json, whose `added_tokens_decoder` has the special tokens by id.
    """
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    entries = (settings.get("added_tokens_decoder") or {}).items()
    added = {int(token_id): added_token(entry, special=True) for token_id, entry in entries}
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([each]) not in ranks for each in range(256)):
        raise ValueError("ranks or single bytes are missing")
    if max(map(len, ranks)) > _MOST_CHARACTERS:
        raise ValueError("a piece is too long")
    letters = byte_letters()
    vocab = {"".join(map(letters.__getitem__, token)): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_merges(vocab, vocab.items()), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, {each: token for each, token in added.items() if each >= len(ranks)}, len(ranks))
    return tokenizer


def _merges(vocab: Mapping[str, int], pieces: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Returns all pairs of a vocabulary that make one of these pieces: those of a piece of lower rank first, of one
    rank by the numbers of left and right. tiktoken and SentencePiece merge any of them at the piece's rank."""
    merges = []
    for text, rank in pieces:
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        pairs = ((left, right) for left, right in cuts if left in vocab and right in vocab)
        merges += [(rank, vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(merges)]


def added_token(entry: Mapping[str, Any] | str, *, special: bool) -> AddedToken:
    """Returns the token of an entry of `added_tokens_decoder`; `special` is for entries that do not say it."""
    entry = {"content": entry} if isinstance(entry, str) else entry
    text, special = str(entry["content"]), bool(entry.get("special", special))
    # Special tokens are cut out of the text as it is. Only normalized texts have SentencePiece's "▁".
    normalized = not special and ("▁" in text or bool(entry.get("normalized")))
    others = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(text, special=special, normalized=normalized, **others)


def add_tokens(tokenizer: Tokenizer, added: Mapping[int, AddedToken], size: int) -> None:
    """Adds tokens by id to a vocabulary of a size.

    Raises:
        ValueError: a token does not get its id, as its text belongs to another one; or an id is far above the others.
    """
    if max(added, default=0) > size + MOST_ADDED:
        raise ValueError(f"an added token has the id {max(added)}, for {size} others")
    # Added tokens get the next ids in order, so that gaps need tokens, too: Kimi's code gives them these names.
    gaps = {*range(size, 1 + max(added, default=-1))} - added.keys()
    fill = {number: AddedToken(f"<|reserved_token_{number}|>", special=True, normalized=False) for number in gaps}
    tokens = sorted((fill | dict(added)).items())
    tokenizer.add_tokens([token for _, token in tokens])
    for number, token in tokens:
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(f"the added token {token.content!r} gets the id {found}, not {number}")


def add_lacking(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds the tokens of `added_tokens_decoder` that a tokenizer does not cut texts at yet, as transformers does.

    A token that is in the vocabulary keeps its id. One that is not, with an id that belongs to another, is left out.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: the entries are not of this form.
    """
    entries, present = settings.get("added_tokens_decoder") or {}, tokenizer.get_added_tokens_decoder()
    size = max([tokenizer.get_vocab_size(with_added_tokens=False), *(number + 1 for number in present)])
    known = {token.content for token in present.values()}
    added = {int(number): added_token(entry, special=False) for number, entry in entries.items()}
    lacking = {number: token for number, token in added.items() if token.content not in known}
    inside = {token.content for token in lacking.values() if tokenizer.token_to_id(token.content) is not None}
    tokenizer.add_tokens([token for token in lacking.values() if token.content in inside])
    new = {number: token for number, token in lacking.items() if number >= size and token.content not in inside}
    add_tokens(tokenizer, new, size)


def read_tokenizer_json(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Reads `tokenizer.json`, with the tokens that only tokenizer_config.json has."""
    tokenizer = Tokenizer.from_file(str(path))
    add_lacking(tokenizer, settings)
    return tokenizer


VOCABULARY_FILE = "vocab.json"
LETTERS = {"GPT2Tokenizer": None, "Qwen2Tokenizer": r"\p{L}", "Qwen3_5Tokenizer": r"\p{L}\p{M}"}
"""What words consist of, by the known classes of tokenizers; None: as the package has it."""


def class_of(settings: Mapping[str, Any]) -> str:
    """Returns the class of a tokenizer, whose code has how texts are split."""
    return str(settings.get("tokenizer_class")).removesuffix("Fast")


def read_vocabulary(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Reads `vocab.json` and `merges.txt` of one of the known classes."""
    space, letters = settings.get("add_prefix_space") is True, LETTERS[class_of(settings)]
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name("merges.txt"))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=letters is None)
    if letters is not None:
        words = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|\p{{N}}| ?[^\s{letters}\p{{N}}]+[\r\n]*"
        pattern = rf"{_SUFFIXES.removesuffix('?')}|{words}|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    add_lacking(tokenizer, settings)
    _add_ends(tokenizer, {}, {"add_bos_token": False, **settings})
    return tokenizer


def byte_letters() -> dict[int, str]:
    """Returns the character for each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [each for each in range(256) if each not in plain]
    return {each: chr(each) for each in plain} | {each: chr(256 + i) for i, each in enumerate(others)}


SENTENCEPIECE_FILE = "tokenizer.model"
_MOST_BYTES = 256 << 20
_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
Fields = dict[int, list[Any]]


def read_sentencepiece(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """Reads a tokenizer of SentencePiece, as older repositories have it.

    The file is a message of protocol buffers (`sentencepiece_model.proto`): pieces with scores and types, and how texts
    are normalized before they are split. Fields that are not named here do not change how texts are encoded.

    Args:
        path: the file.
        settings: tokenizer_config.json: `added_tokens_decoder`, which may rename pieces; `bos_token`, `eos_token`,
            `add_bos_token` (true without it, if there is such a token), `add_eos_token`, and `legacy` (true without
            it): texts after special tokens begin with a space too.
    """
    with open_regular(path) as file:
        fields = _message(file.read(_MOST_BYTES))
    trainer, rules = (_message(_last(fields, number, b"")) for number in (2, 3))
    pieces = [_message(piece) for piece in fields.get(1, ())]
    texts = [_last(piece, 1, b"").decode() for piece in pieces]
    scores = [float(_last(piece, 2, 0.0)) for piece in pieces]
    kinds = [_last(piece, 3, 1) for piece in pieces]
    added = _added(texts, kinds, settings.get("added_tokens_decoder") or {})
    model = _model(_last(trainer, 3, _UNIGRAM), texts, scores, kinds, bool(_last(trainer, 35, 0)))
    tokenizer = Tokenizer(model)
    whole = [token.content for token in added.values() if token.normalized]
    _normalize(tokenizer, rules, whole, legacy=settings.get("legacy") is not False)
    add_tokens(tokenizer, added, len(texts))
    _add_ends(tokenizer, trainer, settings)
    return tokenizer


def _model(kind: int, texts: list[str], scores: list[float], kinds: list[int], byte_fallback: bool) -> Any:
    unknown = kinds.index(_UNKNOWN)
    if max(map(len, texts)) > _MOST_CHARACTERS:
        raise ValueError("a piece is too long")
    if kind == _UNIGRAM:
        # What is no piece of text must never be chosen; the lowest score of all is not enough for that.
        usable = [score if kind in (1, 6) else -1e6 for score, kind in zip(scores, kinds, strict=True)]
        return models.Unigram(list(zip(texts, usable, strict=True)), unknown, byte_fallback)
    if kind != _BPE:
        raise ValueError(f"model_type {kind}: BPE and unigram are supported")
    vocab = {text: number for number, text in enumerate(texts)}
    made = [(text, -score) for text, score, kind in zip(texts, scores, kinds, strict=True) if kind in (1, _UNUSED)]
    merges = _merges(vocab, made)
    return models.BPE(vocab=vocab, merges=merges, unk_token=texts[unknown], fuse_unk=True, byte_fallback=byte_fallback)


def _normalize(tokenizer: Tokenizer, rules: Fields, whole: list[str], *, legacy: bool) -> None:
    """Sets what happens before texts are split into pieces, and its inverse. `whole`: tokens in normalized texts."""
    steps: list[Any] = []
    prefix, charsmap = bool(_last(rules, 3, 1)), _last(rules, 2, b"")
    if charsmap:
        steps.append(normalizers.Precompiled(charsmap))
    if _last(rules, 4, 1):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix and legacy:
        # The package normalizes these tokens' own texts too. They must stay as they are.
        others = Regex(rf"\A(?!(?:{'|'.join(map(re.escape, whole))})?\z)")
        steps.append(normalizers.Replace(others, _SPACE) if whole else normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if prefix and not legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if prefix else [])
    )


def _added(texts: list[str], kinds: list[int], more: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Returns tokens that texts are cut at: special ones, those of the user, and tokenizer_config.json's, which may
    rename a piece."""
    own = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    entries = {number: {"content": texts[number], "special": own[kind]}
               for number, kind in enumerate(kinds) if kind in own}  # fmt: skip
    entries |= {int(number): entry for number, entry in more.items()}
    first, last = min(entries, default=0), max(entries, default=0)
    if not 0 <= first <= last <= len(texts) + MOST_ADDED:
        raise ValueError(f"ids of added tokens are from {first} to {last}, for {len(texts)} pieces")
    added = {number: added_token(entry, special=False) for number, entry in entries.items()}
    for number, token in added.items():
        if number < len(texts) and texts[number] != token.content:
            texts[number] = token.content
            kinds[number] = kinds[number] if kinds[number] in own else _CONTROL
    return added


def _add_ends(tokenizer: Tokenizer, trainer: Fields, settings: Mapping[str, Any]) -> None:
    """Sets what begins and ends an encoded text."""
    ends: dict[str, tuple[str, int]] = {}
    for role, field, usual in (("bos", 41, 1), ("eos", 42, 2)):
        named = settings.get(f"{role}_token")
        named = named.get("content") if isinstance(named, Mapping) else named
        number = tokenizer.token_to_id(named) if isinstance(named, str) else None
        # The file's own ids; there may be none (-1, which is a huge number here).
        number = _last(trainer, field, usual) if number is None else number
        text = tokenizer.id_to_token(number) if number < tokenizer.get_vocab_size() else None
        if text is not None and settings.get(f"add_{role}_token", role == "bos"):
            ends[role] = text, number
    single = [ends[role][0] if role in ends else "$A" for role in ("bos", "text", "eos") if role in {"text", *ends}]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*ends.values()])


def _last(fields: Fields, number: int, default: Any) -> Any:
    return fields.get(number, [default])[-1]


def _message(data: bytes) -> Fields:
    """Returns the values of a message's fields by their numbers: integers, float32, or bytes.

    Raises:
        ValueError: it is no message, or has a group.
    """
    from google.protobuf.empty_pb2 import Empty  # only those who need it wait for it
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    found: Fields = {}
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except (DecodeError, TypeError):
        raise ValueError("it is cut off, or no message of SentencePiece") from None
    for field in fields:
        value = field.data
        if field.wire_type == 1:  # 64 bits
            value = struct.pack("<Q", value)
        elif field.wire_type == 5:  # 32 bits
            (value,) = struct.unpack("<f", struct.pack("<I", value))
        elif field.wire_type == 3:
            raise ValueError(f"field {field.field_number} is a group")
        found.setdefault(field.field_number, []).append(value)
    return found
