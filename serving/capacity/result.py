"""What a plan comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.capacity.compiling import Program
from serving.capacity.count import Work
from serving.capacity.targets import Target
from serving.engine.sizing import StoreSize


@dataclass(frozen=True)
class Step:
    """One program: what it must move and compute at least, and how long that takes at published speeds."""

    name: str
    tokens: int
    """Fed to the model."""
    emitted: int
    """Tokens that come out at least: drafts may add to them."""
    work: Work
    without_keys: int
    """Bytes of `work`, keys and values aside: what a compiled program's `moved` is held against."""
    memory_ms: float
    compute_ms: float
    link_ms: float
    bound_ms: float
    """No step is faster: the larger of memory and compute, and then the exchange between devices."""
    tokens_per_second: float
    """At that bound; of a decode step those that come out, of a prefill step those that go in."""


@dataclass(frozen=True)
class CapacityPlan:
    """What `mamba-jax plan` reports. Bytes are those of one device."""

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
    """How often devices must tell each other something in a step, by what."""
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
        """Whether the compiler has been asked, or everything is arithmetic."""
        return bool(self.programs)

    def sequences_at(self, tokens: int) -> tuple[int, str]:
        """How many sequences of `tokens` tokens run at once, and what limits them: `pages` or `max_num_seqs`."""
        if self.size is None:
            return 0, "memory"
        size = self.size
        if not size.num_pages:
            return size.max_num_seqs, "max_num_seqs"
        by_pages = (size.num_pages - 1) // -(-tokens // size.page_size)
        return (by_pages, "pages") if by_pages < size.max_num_seqs else (size.max_num_seqs, "max_num_seqs")
