"""Where drafts come from: guesses at the next tokens, made on the device at the end of each step.

A source is one file: see `DraftSource`.
"""

from mamba_jax.drafts.base import DraftSource, StepFacts
from mamba_jax.drafts.mtp import BlockDrafts, MTPCache, MTPDrafts
from mamba_jax.drafts.ngram import NGramDrafts
