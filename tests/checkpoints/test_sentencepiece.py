"""`tokenizer.model`: the tokens are those of SentencePiece's own algorithm, written here from its definition."""

import json
import random
import struct
from itertools import pairwise

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.tokenizer import read_tokenizer
from tests.checkpoints.checks import message

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
WORDS = ["▁", "▁t", "he", "▁the", "▁▁", "th", "a", "b", "ab", "t", "h", "e", "é", "日", "日本", "本", "1", "▁a", "▁b"]
SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<turn>", USER)]
BYTES = [(f"<0x{each:02X}>", BYTE) for each in range(256)]
PIECES = [*SPECIAL, *BYTES, *((word, NORMAL) for word in WORDS)]
SCORES = {word: -float((rank + 1) ** 1.37) for rank, word in enumerate(WORDS)}


def varint(value):
    low = bytes([value & 0x7F | (0x80 if value > 0x7F else 0)])
    return low + (varint(value >> 7) if value > 0x7F else b"")


def field(number, value):
    """A field of a protocol buffer: a number, a float, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def write(directory, *, kind=2, prefix=1, whitespace=0, more=(), **settings):
    listed = [*PIECES, *more]
    pieces = (field(1, text.encode()) + field(2, SCORES.get(text, 0.0)) + field(3, of) for text, of in listed)
    trainer = field(3, kind) + field(35, 1) + field(43, (1 << 64) - 1)
    rules = field(3, prefix) + field(4, whitespace)
    content = b"".join(field(1, piece) for piece in pieces) + field(2, trainer) + field(3, rules)
    (directory / "tokenizer.model").write_bytes(content)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings}))
    return read_tokenizer(directory)


def merged(parts, ranks):
    """Byte-pair encoding: merges the neighbors whose piece has the lowest rank, the first of equal ones."""
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def best(text, kind):
    """The pieces of a text: BPE merges the pair with the highest score; unigram takes the pieces with the highest sum
    of scores."""
    if kind == 2:
        return merged(list(text), {piece: -score for piece, score in SCORES.items()})
    ways = [(0.0, [])]
    for end in range(1, len(text) + 1):
        cuts = ((start, text[start:end]) for start in range(end))
        # Unknown characters cost ten more than the worst piece.
        known = [(start, piece, SCORES.get(piece, min(SCORES.values()) - 10)) for start, piece in cuts
                 if piece in SCORES or len(piece) == 1]  # fmt: skip
        ways.append(max((ways[start][0] + score, [*ways[start][1], piece]) for start, piece, score in known))
    return ways[-1][1]


@pytest.mark.parametrize("kind", [1, 2], ids=["unigram", "BPE"])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("whitespace", [0, 1])
def test_tokens_are_those_of_its_own_algorithm(tmp_path, kind, prefix, whitespace):
    tokenizer, rng = write(tmp_path, kind=kind, prefix=prefix, whitespace=whitespace), random.Random(0)
    ids = {text: number for number, (text, _) in enumerate(PIECES)}
    for _ in range(500):
        text = "".join(rng.choice("  thheeab日本é1x\n😀") for _ in range(rng.randint(1, 20)))
        normal = " ".join(part for part in text.split(" ") if part) if whitespace else text
        if not normal:
            continue
        expected = []
        for piece in best("▁" * prefix + normal.replace(" ", "▁"), kind):
            as_bytes = (f"<0x{byte:02X}>" for byte in piece.encode())
            expected += [ids[piece]] if piece in ids else [ids[byte] for byte in as_bytes]
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == expected, text
        assert tokenizer.decode(found) == normal
        assert b"".join(map(tokenizer.token_bytes, found)).decode() == " " * prefix + normal
        texts = "".join(map(tokenizer.token_text, found))
        assert "\N{REPLACEMENT CHARACTER}" in texts or texts == " " * prefix + normal


def test_special_tokens_and_what_begins_a_text(tmp_path):
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(PIECES) + 1}))
    tokenizer = write(tmp_path)
    the = len(SPECIAL) + 256 + WORDS.index("▁the")
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.encode("the<turn>the</s><pad>") == [1, the, 3, the, 2, len(PIECES) + 1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, len(PIECES) + 2)
    assert write(tmp_path, add_bos_token=False, add_eos_token=True).encode("the") == [the, 2]
    assert write(tmp_path, legacy=False).encode("the<turn>th") == [1, the, 3, the - 3 + WORDS.index("th")]
    assert write(tmp_path, legacy=None).encode("the<turn>the") == [1, the, 3, the]
    added = {str(len(PIECES)): {"content": "[X]", "special": True}}
    assert write(tmp_path, added_tokens_decoder=added).encode("[X]") == [1, len(PIECES)]
    ends = {"bos_token": "[X]", "eos_token": {"content": "<turn>"}, "add_eos_token": True}
    assert write(tmp_path, added_tokens_decoder=added, **ends).encode("the") == [len(PIECES), the, 3]
    assert write(tmp_path, bos_token="[Y]", eos_token=None, add_eos_token=True).encode("the") == [1, the, 2]


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        ("a\n    b", {"prefix": 0}, ["a", "<0x0A>", "▁▁▁▁", "b"]),
        ("a\n    b", {}, ["▁a", "<0x0A>", "▁▁▁▁", "b"]),
        ("a\n    b", {"legacy": False}, ["▁a", "<0x0A>", "▁▁▁▁", "b"]),
        ("    b", {}, ["▁▁▁▁", "▁b"]),
        ("a[X]b", {}, ["▁a", "[X]", "b"]),
        ("[Y]  b a", {"prefix": 0}, ["[Y]", "b", "▁a"]),
        ("a  [Z] b[Z]b", {"prefix": 0}, ["a", "[Z]", "▁b", "[Z]", "b"]),
        ("[W]b [W]", {"prefix": 0}, ["<0x5B>", "<0x57>", "<0x5D>", "b", "▁", "[W]"]),
    ],
)
def test_added_tokens_are_found_as_they_say(tmp_path, text, rules, expected):
    flags = {"X": "normalized", "Y": "rstrip", "Z": "lstrip", "W": "single_word"}
    added = {str(len(PIECES) + 1 + i): {"content": f"[{x}]", flag: True} for i, (x, flag) in enumerate(flags.items())}
    added[str(len(PIECES))] = {"content": "▁▁▁▁", "normalized": False}
    tokenizer = write(tmp_path, more=[("▁▁▁▁", USER)], added_tokens_decoder=added, **rules)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer._backend.id_to_token(each) for each in ids] == expected


@pytest.mark.parametrize("kind", [1, 2], ids=["unigram", "BPE"])
def test_added_tokens_rename_pieces_or_are_refused(tmp_path, kind):
    the, size = len(SPECIAL) + 256 + WORDS.index("▁the"), len(PIECES)
    names = {1: "<|im_start|>", the: "[A]", size: "<|im_end|>"}
    added = {str(number): {"content": text, "special": True} for number, text in names.items()}
    tokenizer = write(tmp_path, kind=kind, added_tokens_decoder=added)
    assert tokenizer.encode("[A]<|im_end|><|im_start|>") == [1, the, size, 1]
    assert the not in tokenizer.encode(" the")
    assert tokenizer.vocab_size == size + 1
    for number, text, found in ((size + 1, "<|im_end|>", size), (size + 1, "▁a", size - 2), (1, "</s>", 2)):
        repeated = added | {str(number): {"content": text}}
        said = f"(the added token '{text}' gets the id {found}, not {number})"
        assert said in message(write, tmp_path, kind=kind, added_tokens_decoder=repeated)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n", b"abc 1\n"])
def test_a_file_of_another_form_counts_as_none(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    assert read_tokenizer(tmp_path) is None


GROUP = b"\x0a\x00\x0b\x0c"


@pytest.mark.parametrize("content", [b"\x0a\x05ab", field(1, field(1, b"a")), GROUP, b"\x0a" + b"\xff" * 12])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a usable tokenizer \([^\n]+\)$"):
        read_tokenizer(tmp_path)
    whole = write(tmp_path).encode("the")
    with (tmp_path / "tokenizer.model").open("ab") as file:
        file.write(varint(99 << 3 | 1) + bytes(8))  # 64 bits of a field that is not read
    assert read_tokenizer(tmp_path).encode("the") == whole
    assert "model_type 3: BPE and unigram are supported" in message(write, tmp_path, kind=3)
    assert "a piece is too long" in message(write, tmp_path, more=[("a" * 4097, NORMAL)])
    with pytest.raises(CheckpointError, match="ids of added tokens are from 0 to 1000000000"):
        write(tmp_path, added_tokens_decoder={"1000000000": {"content": "x"}})
