"""Step programs that run one kind of batch with code changed by a planted fault."""

from mamba_jax.programs import StepPrograms


class PatchedPrograms:
    """Runs batches of one kind with `own` programs and all others with `shared` ones.

    `compiles` is "decode", "prefill", or None: no batches run with `own` programs.
    """

    adapters = None
    compilations = 0

    def __init__(self, shared: StepPrograms, own: StepPrograms | None, compiles: str | None) -> None:
        self.shared, self.own = shared, own
        self.compiles = f"{compiles.capitalize()}Batch" if compiles else ""
        self.change_rows, self.kernels = shared.change_rows, shared.kernels

    def step(self, store, rows, batch):
        own = type(batch).__name__ == self.compiles
        return (self.own if own else self.shared).step(store, rows, batch)
