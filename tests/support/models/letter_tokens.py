"""A tokenizer whose tokens are characters, and a few pairs of them: grammars can be written out by hand for it."""

import tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from checkpoints.tokenizer import Tokenizer

WORDS = ["<eos>", "ab", *map(chr, range(ord("!"), ord("~") + 1))]
ID = {word: i for i, word in enumerate(WORDS)}
EOS = ID["<eos>"]
TOO_BIG = '("a" | "b" | "ab")? ' * 300
"""Part of a grammar that compiles, and fails when a token is followed into it."""


def letters() -> Tokenizer:
    """Token i is the text `WORDS[i]`."""
    backend = tokenizers.Tokenizer(WordLevel(ID, unk_token="!"))
    backend.pre_tokenizer = Split("", "isolated")
    backend.decoder = ByteLevel()
    return Tokenizer(backend)
