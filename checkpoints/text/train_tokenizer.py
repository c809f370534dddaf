"""Training of a small byte-level BPE on a corpus that `mamba_jax.train.corpus` has written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mamba_jax.train.corpus import read_documents, text_of

PAD, BOS, EOS, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
"""The entries 0 to 4."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MOST_CHARACTERS = 6_000_000  # of one source: problems made from templates would otherwise fill the vocabulary


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE that can spell any text, keeps digits apart and begins every prompt with the bos token."""
    tokenizer = Tokenizer(models.BPE())
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
