"""The results of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.capacity.compiling import Program
from serving.capacity.count import Work
from serving.capacity.targets import Target
from serving.engine.assembly.sizing import StoreSize


@dataclass(frozen=True)
class Step:
    """One program: the least that it must move and compute, and the time for this at published speeds."""

    name: str
    tokens: int
    """Fed to the model."""
    emitted: int
    """Tokens that come out at least: drafts may add to them."""
    work: Work
    without_keys: int
    """Bytes of `work` without keys and values, to compare with `moved` of a compiled program."""
    memory_ms: float
    compute_ms: float
    link_ms: float
    bound_ms: float
    """No step is faster: the larger of memory and compute, and then the exchange between devices."""
    latency_ms: float
    """Assumed time in which devices wait for each other, in addition to the transfer."""
    launch_ms: float
    """Assumed time to start and end the kernels of a GPU; 0 on TPU, whose step is one program."""
    kernels: int
    """Of a step on a GPU: counted in the compiled program, or by kinds of layers."""
    host_ms: float
    """Assumed time of the host for a step, which it spends while the step before runs."""
    tokens_per_second: float
    """At the bound; of a decode step those that come out, of a prefill step those that go in."""

    @property
    def expected_ms(self) -> float:
        """The bound with latency and launches, or the host's time where that is longer."""
        return max(self.bound_ms + self.latency_ms + self.launch_ms, self.host_ms)


@dataclass(frozen=True)
class CapacityPlan:
    """The report of `mamba-jax plan`. Bytes are per device."""

    model: str
    target: Target
    dtype: str
    parameters: int
    fits: bool
    spare: int
    """Bytes left (negative: missing) after weights, store, programs and temporaries."""
    limit: int
    """Bytes that programs and data may have together."""
    weights: int
    store: int
    code: int
    temporaries: int
    other: int
    """Seats and batches."""
    size: StoreSize | None
    """None where not even one sequence fits."""
    steps: tuple[Step, ...] = ()
    context: int = 0
    """Tokens before each sequence's next one that decode steps are counted with."""
    exchanges: dict[str, int] = field(default_factory=dict)
    """Number of collectives in a step, by kind."""
    bytes_off_device: int = 0
    """Of one state in host memory, on disk or on its way to another worker; without keys and values."""
    programs: tuple[Program, ...] = ()
    """Those that were compiled; empty if nothing was."""
    num_programs: int = 0
    """Step programs that an engine compiles in all."""
    kernels: str = ""
    notes: tuple[str, ...] = ()
    compile_seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether the figures are the compiler's, or estimates."""
        return bool(self.programs)

    def sequences_at(self, tokens: int) -> tuple[int, str]:
        """Returns the number of sequences of `tokens` tokens that run at once, and their limit: `pages` or
        `max_num_seqs`."""
        if self.size is None:
            return 0, "memory"
        size = self.size
        if not size.num_pages:
            return size.max_num_seqs, "max_num_seqs"
        by_pages = (size.num_pages - 1) // -(-tokens // size.page_size)
        return (by_pages, "pages") if by_pages < size.max_num_seqs else (size.max_num_seqs, "max_num_seqs")
