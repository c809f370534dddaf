"""Compiled steps that tests share: within a process, with the other processes of a run, and with later runs."""

from mamba_jax.model import HybridModel
from mamba_jax.program_cache import ProgramCache
from mamba_jax.programs import StepPrograms, samples
from serving.engine.compiled_programs import keep_programs
from tests.support.engines.engines import QUICK_COMPILE


class SharedPrograms(StepPrograms):
    """Greedy programs, which compile in half of the time, until a request samples; then programs with everything."""

    def change_rows(self, rows, batch):
        if self.greedy and samples(batch):
            self.greedy, self.cache = False, ProgramCache()
            if self.kept is not None:
                keep_programs(self)
        return super().change_rows(rows, batch)


def shared_programs(model: HybridModel, *, greedy: bool = True, **options) -> StepPrograms:
    """`StepPrograms` of a model, saved for later runs. Not for tests that change code which a program traces.

    What is saved is found by the source text of the packages. A draft source that a test defines is not part of that:
    its programs are not saved. `greedy`: most requests are; False saves the greedy programs where most sample.
    """
    programs = SharedPrograms(model, greedy=greedy, **({"compiler_options": QUICK_COMPILE} | options))
    source = options.get("source")
    if source is None or type(source).__module__.startswith("mamba_jax."):
        keep_programs(programs)
    return programs
