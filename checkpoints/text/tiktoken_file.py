"""Tokenizers in tiktoken's form: `tiktoken.model`, as Kimi's repositories have it in place of `tokenizer.json`.

Each line has a token's bytes in base64, and its rank. Texts are first split by a regular expression, which is part of
the repository's code and not of the file: it is that of Kimi here.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from checkpoints.errors import CheckpointError, one_line

TIKTOKEN_FILE = "tiktoken.model"
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
    """Reads a tokenizer.

    Args:
        path: the file.
        settings: tokenizer_config.json, whose `added_tokens_decoder` has the special tokens by id.
    Raises:
        CheckpointError: the file is not of this form, or ranks or ids are missing.
    """
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        entries = (settings.get("added_tokens_decoder") or {}).items()
        added = {int(token_id): added_token(entry, special=True) for token_id, entry in entries}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a usable tokenizer ({one_line(error)})") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([each]) not in ranks for each in range(256)):
        raise CheckpointError(f"{path}: not a usable tokenizer (ranks or single bytes are missing)")
    if max(added, default=0) > len(ranks) + MOST_ADDED:
        raise CheckpointError(f"{path}: an added token has the id {max(added)}, for {len(ranks)} ranks")
    letters = byte_letters()
    texts = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        # All pairs that make a token, as tiktoken merges any of them at the token's rank.
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = sorted(
            (ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks
        )
        merges += ((texts[left], texts[right]) for *_, left, right in pairs)
    vocab = {texts[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    try:
        add_tokens(tokenizer, {each: token for each, token in added.items() if each >= len(ranks)}, len(ranks))
    except ValueError as error:
        raise CheckpointError(f"{path}: not a usable tokenizer ({one_line(error)})") from error
    return tokenizer


def added_token(entry: Mapping[str, Any], *, special: bool) -> AddedToken:
    """Returns the token of an entry of `added_tokens_decoder`; `special` is for entries that do not say it."""
    text, special = str(entry["content"]), bool(entry.get("special", special))
    # Special tokens are cut out of the text as it is. Only normalized texts have SentencePiece's "▁".
    normalized = not special and ("▁" in text or bool(entry.get("normalized")))
    others = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(text, special=special, normalized=normalized, **others)


def add_tokens(tokenizer: Tokenizer, added: Mapping[int, AddedToken], size: int) -> None:
    """Adds tokens by id to a vocabulary of a size.

    Raises:
        ValueError: a token does not get its id, as its text belongs to another one.
    """
    # Added tokens get the next ids in order, so that gaps need tokens, too: Kimi's code gives them these names.
    gaps = {*range(size, 1 + max(added, default=-1))} - added.keys()
    fill = {number: AddedToken(f"<|reserved_token_{number}|>", special=True, normalized=False) for number in gaps}
    tokens = sorted((fill | dict(added)).items())
    tokenizer.add_tokens([token for _, token in tokens])
    for number, token in tokens:
        if (found := tokenizer.token_to_id(token.content)) != number:
            raise ValueError(f"the added token {token.content!r} gets the id {found}, not {number}")


def byte_letters() -> dict[int, str]:
    """Returns the character for each byte in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [each for each in range(256) if each not in plain]
    return {each: chr(each) for each in plain} | {each: chr(256 + i) for i, each in enumerate(others)}
