"""Engines of one tiny model over one set of compiled programs: they differ in policy only."""

import random
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from checkpoints.load import load_model
from checkpoints.tokenizer import Tokenizer
from mamba_jax.programs import StepPrograms
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import finish, use_widest_steps
from tests.support.engines.step_programs import shared_programs
from tests.support.models.golden_case import log_probs

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "nemotronh"
# A pool so small that 64 requests preempt and evict each other all the time.
FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_model_len": 160, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "num_slots": 20, "num_pages": 26, "debug_state": True, "warmup": False,
    "replay_interval": 1,
}  # fmt: skip
SMALL = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_model_len": 96, "max_num_seqs": 1,
    "max_num_batched_tokens": 64, "num_slots": 16, "num_pages": 40, "warmup": False,
}  # fmt: skip
"""Flags of engines that run one request at a time."""


class EngineHarness:
    """Makes engines over shared programs, runs them to the end, and judges greedy outputs by the model itself."""

    flags, golden = FLAGS, GOLDEN

    def __init__(self) -> None:
        self.model = load_model(GOLDEN, dtype="float32", progress=False)
        self.programs = shared_programs(self.model, tile_size=FLAGS["tile_size"], greedy=False)
        self.vocab_size = self.model.config.vocab_size
        backend = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(self.vocab_size)}, unk_token="w0"))
        backend.pre_tokenizer = WhitespaceSplit()
        template = "{% for message in messages %}{{ message.content }} {% endfor %}w9"
        self.tokenizer = Tokenizer(backend, chat_templates={"default": template})
        """Token i is the word "wi"."""

    def engine(self, mode: str | None = None, *, programs: StepPrograms | None = None, **flags):
        """An engine that runs all steps by the widest program of each kind."""
        engine = self.build(EngineConfig.create(mamba_cache_mode=mode, **(FLAGS | flags)), programs).engine
        use_widest_steps(engine)
        return engine

    def build(self, config: EngineConfig, programs: StepPrograms | None = None):
        programs = programs or self.programs
        return assemble(config, self.model, tokenizer=self.tokenizer, eos_token_ids=(2,), programs=programs)

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(3, self.vocab_size) for _ in range(length)]

    def run(self, engine, prompts, params):
        """All prompts at once; outputs in their order. Afterwards every slot and page must be accounted for."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        outputs = [
            engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, each)
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        finish(engine)
        engine.loop.scheduler.check(idle=True)
        return outputs

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        """[tokens, vocab] by the model's full-sequence form."""
        return log_probs(self.model, tokens, FLAGS["max_model_len"])

    def assert_greedy(self, prompt, tokens, other):
        """Two greedy outputs are equal, up to a first difference at which the model all but ties."""
        if tokens == other:
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b)
        said = self.log_probs([*prompt, *tokens[:at]])[-1]
        assert abs(float(said[tokens[at]] - said[other[at]])) < 1e-4, (at, tokens, other)
        assert said.max() - said[tokens[at]] < 1e-4
