"""Compiled steps that tests share: within a process, with the other processes of a run, and with later runs."""

from mamba_jax.model import HybridModel
from mamba_jax.programs import StepPrograms
from serving.engine.programs.kept_programs import keep_programs
from tests.support.engines import QUICK_COMPILE


def shared_programs(model: HybridModel, **options) -> StepPrograms:
    """`StepPrograms` of a model, saved for later runs. Not for tests that change code which a program traces.

    What is saved is found by the source text of the packages. A draft source that a test defines is not part of that:
    its programs are not saved.
    """
    programs = StepPrograms(model, **({"compiler_options": QUICK_COMPILE} | options))
    source = options.get("source")
    if source is None or type(source).__module__.startswith("mamba_jax."):
        keep_programs(programs)
    return programs
