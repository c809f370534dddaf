"""What all tests that run engines need: programs that compile fast, a run to the end, and outputs to compare with."""

from dataclasses import dataclass

from tests.support import cpu_options

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""Compiler options: LLVM's optimizations would take longer than all the steps of a test."""
OPTIMIZED = {"xla_backend_optimization_level": 3}
"""What users run. Quick compilers do not contract products and sums, and have other exponentials: bits can be equal
that differ between users' programs."""
QUICK_XLA_FLAGS = " ".join(["--xla_backend_optimization_level=0", *([cpu_options.OLDER] if cpu_options.EXIST else [])])
"""The same for a process of its own."""


def use_widest_steps(engine) -> None:
    """Run all steps of an engine by the widest program of each kind, so that a test compiles few."""
    batches = engine.loop.batches
    batches.decode_shapes, batches.prefill_shapes = batches.decode_shapes[-1:], batches.prefill_shapes[-1:]
    batches.mixed_shapes = batches.mixed_shapes[-1:]


def leave_pages(llm, count: int) -> None:
    """Hold all but so many pages: requests preempt each other, in the programs of a store of the usual size."""
    pages = llm.engine.loop.scheduler.cache.pools[1]
    while len(pages.free) > count:
        pages.take()


def finish(engine) -> None:
    """Run an engine until nothing is left to do, the last step in flight included."""
    for _ in range(5000):
        if not engine.loop.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


@dataclass(frozen=True)
class Continuation:
    """What one choice says: tokens, each one's log-probability, and by how much the likeliest beat the next."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    tables: list[dict[int, float]]
    """Of each place, the log-probabilities of the chosen token and the alternatives."""

    @classmethod
    def of(cls, choice) -> "Continuation":
        """That of a choice for which two or more log-probabilities were asked."""
        gaps = []
        for table in choice.logprobs:
            best = sorted((entry.logprob for entry in table.values()), reverse=True)
            gaps.append(best[0] - best[1])
        chosen = [table[token].logprob for token, table in zip(choice.token_ids, choice.logprobs, strict=True)]
        tables = [{token: entry.logprob for token, entry in table.items()} for table in choice.logprobs]
        return cls(list(choice.token_ids), chosen, gaps, tables)
