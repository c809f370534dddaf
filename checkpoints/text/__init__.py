"""Text and token ids: chat templates, streams of text, training of tokenizers."""
