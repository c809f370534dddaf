"""Tokenizers: special tokens from every file that may name them, and streams that equal the whole text."""

import base64
import json
import random

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.resolve import DEMO_DIRECTORY
from checkpoints.text.stream import StreamDecoder
from checkpoints.text.tokenizer_files import byte_letters
from checkpoints.text.training_data import train_tokenizer
from checkpoints.tokenizer import read_tokenizer
from tests.checkpoints.checks import message
from tests.checkpoints.test_sentencepiece import merged
from tests.checkpoints.test_sentencepiece import write as sentencepiece

TEXT = "Héllo wörld, 日本語 and 😀😀 — “ẞ”.\n\tx  = 1"


@pytest.fixture(scope="module")
def byte_level():
    return read_tokenizer(DEMO_DIRECTORY)


@pytest.fixture(scope="module")
def prefix_space(tmp_path_factory):
    """A space before the first word that is not shown, and bytes for what the vocabulary lacks."""
    return sentencepiece(tmp_path_factory.mktemp("sentencepiece"), add_bos_token=False)


def streamed(tokenizer, ids, rng, **options):
    stream, text = tokenizer.stream(**options), ""
    while ids:
        n = rng.randint(1, 3)
        text, ids = text + stream.push(ids[:n]), ids[n:]
    return text + stream.flush()


def test_round_trip(byte_level):
    assert byte_level.decode(byte_level.encode(TEXT)) == TEXT
    assert byte_level.encode_batch([TEXT, "a"]) == [byte_level.encode(TEXT), byte_level.encode("a")]


def test_special_tokens_are_hidden_unless_wanted(byte_level):
    ids = [*byte_level.encode("a"), byte_level.eos_token_id]
    assert byte_level.decode(ids) == "a"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|bos|>a<|eos|>"
    assert byte_level.encode("a", add_special_tokens=False) == ids[1:-1]


@pytest.mark.parametrize("name", ["byte_level", "prefix_space"])
def test_stream_of_real_text_equals_decode(name, request):
    tokenizer, rng = request.getfixturevalue(name), random.Random(0)
    for text in [TEXT, "a b é 😀 ab", " a", "😀😀😀", ""]:
        ids = tokenizer.encode(text)
        assert streamed(tokenizer, ids, rng) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "prefix_space"])
def test_stream_of_random_tokens_equals_decode(name, request):
    """Of any bytes, and of words and special tokens, after which the space is kept."""
    tokenizer, rng = request.getfixturevalue(name), random.Random(1)
    ids = range(tokenizer.vocab_size + 50)  # ids past the vocabulary too: models pad theirs
    if name == "prefix_space":
        ids = [tokenizer.token_to_id(piece) for piece in ["▁", "▁a", "▁b", "a", "é", "<s>", "</s>"]]
    for _ in range(300):
        chosen = rng.choices(ids, k=rng.randint(0, 60))
        for skip in (True, False):
            whole = tokenizer.decode(chosen, skip_special_tokens=skip)
            assert streamed(tokenizer, chosen, rng, skip_special_tokens=skip) == whole


def test_an_incomplete_character_is_held_back(byte_level):
    ids = byte_level.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    stream = byte_level.stream()
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]
    assert stream.push(ids[:2]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


def test_an_endless_stream_of_broken_characters_costs_a_bounded_window():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return "\N{REPLACEMENT CHARACTER}" * len(ids)

    stream = StreamDecoder(decode)
    assert len("".join(stream.push([0]) for _ in range(3000)) + stream.flush()) == 3000
    assert longest < 1100


def write(directory, **files):
    train_tokenizer(["a b c"], 262).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_special_tokens_map_and_ids_fill_the_gaps(tmp_path):
    write(
        tmp_path,
        tokenizer_config={"eos_token": "<|eos|>", "unk_token": None},
        special_tokens_map={"eos_token": "<|pad|>", "bos_token": {"content": "<|bos|>"}},
        generation_config={"pad_token_id": 0, "eos_token_id": [4]},
        config={"bos_token_id": 3},
    )
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.special_tokens == {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "pad_token": "<|pad|>"}


def test_truncation_and_padding_settings_are_ignored(tmp_path):
    backend = train_tokenizer(["a b c"], 262)
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(read_tokenizer(tmp_path).encode("abcd")) == 5


@pytest.mark.parametrize("content", ["{", "{}", "[]", "\x00"])
def test_broken_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a usable tokenizer \([^\n]+\)$"):
        read_tokenizer(tmp_path)


def test_chat_templates_from_each_place(tmp_path):
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([]) == "named"
    assert tokenizer.apply_chat_template([], tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_tokenizer(tmp_path).apply_chat_template([]) == "file"
    write(tmp_path, tokenizer_config={"chat_template": "plain"})
    (tmp_path / "chat_template.jinja").unlink()
    assert read_tokenizer(tmp_path).apply_chat_template([]) == "plain"
    write(tmp_path, tokenizer_config={})
    assert not read_tokenizer(tmp_path).has_chat_template
    for older in ("older", {"default": "older", "tool_use": None}, [{"name": ["x"]}, *named[1:], {"template": "x"}]):
        write(tmp_path, chat_template={"chat_template": older})
        found = read_tokenizer(tmp_path).chat_templates
        assert found == ({"tool_use": "tools"} if isinstance(older, list) else {"default": "older"})


def test_tokens_that_only_the_configuration_has_are_added(tmp_path):
    names = {2: "[not here]", 5: "a", 262: "<|eos|>", 400: "[A]", 402: "[B]"}
    added = {str(number): {"content": text, "special": text == "[A]"} for number, text in names.items()}
    write(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    tokenizer = read_tokenizer(tmp_path)
    known = tokenizer.token_to_id("a")
    assert tokenizer.encode("a[A]<|eos|>[B]", add_special_tokens=False) == [known, 400, 2, 402]
    assert tokenizer.decode([known, 400, 402]) == "a[B]"
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {str(1 << 30): {"content": "[A]"}}})
    assert "tokenizer.json: not a usable tokenizer (an added token has the id" in message(read_tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("GPT2Tokenizer", ["isn", "'t", " 123", " ह", "ि", "न", "\n ", " e", "\u0301"]),
        ("Qwen2TokenizerFast", ["isn", "'t", " ", "1", "2", "3", " ह", "िन", "\n", " ", " \u00e9"]),
        ("Qwen3_5Tokenizer", ["isn", "'t", " ", "1", "2", "3", " हिन", "\n", " ", " \u00e9"]),
    ],
)
def test_a_vocabulary_and_merges_are_enough_for_known_classes(tmp_path, name, pieces):
    vocab, size = {letter: number for number, letter in enumerate([*byte_letters().values(), "ab"])}, 257
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    for settings in ({"tokenizer_class": name}, {"tokenizer_class": "BloomTokenizer"}, {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | settings))
        tokenizer = read_tokenizer(tmp_path)
        assert (tokenizer is not None) == (settings.get("tokenizer_class") == name)
        if tokenizer is not None:
            assert tokenizer.encode("ab<|im_end|>") == [size - 1, size]
            assert (tokenizer.eos_token_id, tokenizer.decode([size - 1, size])) == (size, "ab")
            text, backend = "isn't 123 हिन\n  e\u0301", tokenizer._backend
            text = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
            spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
            assert [text[begin:end] for begin, end in spans] == pieces


def test_encode_chat_adds_no_second_bos(byte_level):
    ids = byte_level.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(byte_level.bos_token_id) == 1
    text = byte_level.decode(ids, skip_special_tokens=False)
    assert text == "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


SAMPLES = "the theory of 日本語 text isn't THE Text'S 12345 6,789! \r\n\n  \t x  y Ünïcödé ẞß 😀 ﬁ가나다 don’t"


def tiktoken_directory(directory):
    """A small vocabulary in tiktoken's form: ranks in the order of merges, with several ways to make a token."""
    pieces = [b"th", b"he", b"the", b" t", b" the", b"ex", b"xt", b"text", b"tex", b" te", "日".encode(),
              "日本".encode(), b"12", b"123", b"  ", b"in", b"is", b"isn", b"n't", b"'t", b"te"]  # fmt: skip
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *pieces])}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(ranks)): {"content": "[BOS]"}, str(len(ranks) + 2): {"content": "<|im_end|>", "special": True}}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return ranks


def encoded(ranks, piece):
    """tiktoken's algorithm: a piece of the vocabulary is one token, and others are merged."""
    parts = [piece] if piece in ranks else merged([piece[i : i + 1] for i in range(len(piece))], ranks)
    return [ranks[part] for part in parts]


def test_tiktoken_files_give_the_tokens_of_their_own_algorithm(tmp_path):
    ranks, rng = tiktoken_directory(tmp_path), random.Random(0)
    tokenizer = read_tokenizer(tmp_path)
    split = tokenizer._backend.pre_tokenizer[0]
    for _ in range(2000):
        text = "".join(rng.choice(SAMPLES) for _ in range(rng.randint(1, 40)))
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
        assert "".join(pieces) == text
        expected = [token for piece in pieces for token in encoded(ranks, piece.encode())]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text
    special = len(ranks)
    assert tokenizer.encode("[BOS]the<|im_end|>") == [special, ranks[b"the"], special + 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (special, special + 2, special + 3)
    assert tokenizer.decode([special, ranks[b"the"]]) == "the"
    (tmp_path / "tiktoken.model").rename(tmp_path / "tokenizer.model")
    assert read_tokenizer(tmp_path).encode("[BOS]the") == [special, ranks[b"the"]]


@pytest.mark.parametrize(("content", "found"), [("[BOS]", 277), ("the", 258)])
def test_tiktoken_refuses_added_tokens_with_a_text_of_others(tmp_path, content, found):
    size = len(tiktoken_directory(tmp_path))
    added = {str(size): {"content": "[BOS]"}, str(size + 1): {"content": content}, str(size + 2): {"content": "[X]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert f"the added token '{content}' gets the id {found}, not {size + 1}" in message(read_tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello World's 日本語abc", ["Hello", " World's", " ", "日本語", "abc"]),
        ("1234567 a\n\n b", ["123", "456", "7", " a", "\n\n", " b"]),
        ("x = {y}  z", ["x", " =", " {", "y", "}", " ", " z"]),
    ],
)
def test_tiktoken_texts_are_split_as_kimi_splits_them(tmp_path, text, pieces):
    tiktoken_directory(tmp_path)
    split = read_tokenizer(tmp_path)._backend.pre_tokenizer[0]
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("content", [b"\xff\xfe", b"YQ== 0\n", b"YQ==\n", b"", b"YQ== x\n", "huge"])
def test_a_broken_tiktoken_file_is_named(tmp_path, content):
    if content == "huge":  # its merges would take quadratic time
        size = len(tiktoken_directory(tmp_path))
        content = (tmp_path / "tiktoken.model").read_bytes() + base64.b64encode(b"a" * 1_000_000) + b" %d\n" % size
    (tmp_path / "tiktoken.model").write_bytes(content)
    assert "tiktoken.model: not a usable tokenizer" in message(read_tokenizer, tmp_path)
