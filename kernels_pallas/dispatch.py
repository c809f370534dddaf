"""Choosing an implementation: a named choice is strict, the automatic one falls back and reports why.

Automatically, an operation runs by the first of its implementations that is made for the platform compiled for and can
run the call. A Pallas kernel also has to compile: it is compiled alone first, for the shapes of the call, so that a
kernel that the compiler refuses costs a warning and not the program. A CPU has native operations instead (`native`),
which were compiled when the package was installed; Pallas kernels run there only when named (`..._interpreted`), by
Pallas' interpreter.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from kernels_pallas import native

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """The implementation asked for does not exist, or cannot run this call."""


def _always(*args: Any, **kwargs: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation. `unsupported(*args, **kwargs)` tells why it cannot run a call, or gives None."""

    name: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = _always
    platform: str | None = None
    """"tpu", "gpu" or "cpu": for this platform only. None: plain JAX, for all."""
    automatic: bool = True
    """Whether it is ever chosen without being named."""


def kernels(platform: str, module: Any, operation: str) -> tuple[Implementation, Implementation]:
    """The implementations by `module.<operation>`, a kernel for `platform`: compiled, and interpreted (on any)."""
    run, name = getattr(module, operation), f"pallas_{platform}"
    interpreted = functools.partial(run, interpret=True)
    return (
        Implementation(name, run, module.unsupported, platform),
        Implementation(f"{name}_interpreted", interpreted, module.unsupported, automatic=False),
    )


class KernelChoice:
    """What programs are compiled for, and which implementations they use; remembers what was chosen, and why.

    choice = KernelChoice(named={"ssd_scan": "xla"})
    with choice.applied():
        lowered = jax.jit(step).lower(...)  # or anything else that traces operations
    print(choice.report())
    """

    def __init__(
        self,
        *,
        platform: str | None = None,
        device: jax.Device | None = None,
        named: Mapping[str, str] | str | None = None,
    ) -> None:
        """
        Args:
            platform: "tpu", "gpu" or "cpu" that programs are compiled for; by default the one at hand.
            device: kernels are tried on this one's compiler; it may be described only
                (`jax.experimental.topologies`). By default the first one at hand, if that is of `platform`; else
                kernels are only lowered, which finds most of what a compiler would refuse.
            named: implementations by operation, or one name for all operations that have it.
        """
        self.platform = platform or jax.default_backend()
        if device is None and self.platform == jax.default_backend():
            device = jax.local_devices()[0]
        self.device = device
        self.named = named or {}
        self.chosen: dict[str, dict[str, str]] = {}
        """By operation: each implementation in use, and why it is."""

    @classmethod
    def parse(cls, text: str, **kwargs: Any) -> "KernelChoice":
        """A choice as users write it: "auto", a name for all operations that have it, or "scan=xla,update=pallas_tpu".

        Raises:
            UnsupportedError: it is written otherwise.
        """
        text = text.strip()
        if "=" not in text:
            return cls(named=None if text in ("", "auto") else text, **kwargs)
        named = {}
        for part in text.split(","):
            operation, separator, name = (v.strip() for v in part.partition("="))
            if not (operation and separator and name):
                raise UnsupportedError(f"kernels: {part.strip()!r} is not operation=implementation")
            named[operation] = name
        return cls(named=named, **kwargs)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """While it lasts, this thread's operations are chosen by it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @property
    def description(self) -> str:
        """What this makes of a program's text, beside the source: equal descriptions choose equally."""
        library = f" native {native.fingerprint()}" if self.platform == "cpu" else ""
        return f"{self.platform} {self.named!r}{library}"

    def name_for(self, operation: str, candidates: Sequence[Implementation]) -> str | None:
        """The implementation that the user named for an operation, if any."""
        if isinstance(self.named, str):
            return self.named if any(c.name == self.named for c in candidates) else None
        return self.named.get(operation)

    def remember(self, operation: str, implementation: str, why: str) -> None:
        """Notes what an operation runs by, for the report."""
        self.chosen.setdefault(operation, {})[implementation] = why

    def report(self) -> str:
        """One line: what each operation runs by in the programs traced so far, and why not by a kernel."""
        parts = []
        for operation, chosen in sorted(self.chosen.items()):
            by = " and ".join(name + (f" ({why})" if why else "") for name, why in sorted(chosen.items()))
            parts.append(f"{operation} by {by}")
        if unused := sorted(set(self.named) - set(self.chosen)) if isinstance(self.named, Mapping) else []:
            parts.append(f"named, but not in use: {', '.join(unused)}")
        return f"kernels for {self.platform}: " + (", ".join(parts) or "nothing traced yet")


_current: contextvars.ContextVar[KernelChoice | None] = contextvars.ContextVar("kernel_choice", default=None)


def device_kind() -> str:
    """What programs are being compiled for, as the device calls itself; empty where nobody has said."""
    choice = _current.get() or KernelChoice()
    return choice.device.device_kind if choice.device is not None else ""


def call(operation: str, candidates: Sequence[Implementation], name: str | None, *args: Any, **kwargs: Any) -> Any:
    """Runs `operation` by the implementation called `name`, or, for None, by the first of `candidates` that can.

    Raises:
        UnsupportedError: `name` is unknown or cannot run this call, or no candidate can.
    """
    choice = _current.get() or KernelChoice()
    name = name or choice.name_for(operation, candidates)
    if name is not None:
        chosen = next((c for c in candidates if c.name == name), None)
        if chosen is None:
            known = ", ".join(c.name for c in candidates)
            raise UnsupportedError(f"{operation}: no implementation is called {name!r}; there are: {known}")
        if reason := chosen.unsupported(*args, **kwargs):
            raise UnsupportedError(f"{operation}: {name} cannot run this call: {reason}")
        choice.remember(operation, name, "named")
        return chosen.run(*args, **kwargs)
    reasons: list[str] = []
    for candidate in candidates:
        if not candidate.automatic or candidate.platform not in (None, choice.platform):
            continue
        reason = candidate.unsupported(*args, **kwargs)
        if reason is None and candidate.platform in ("tpu", "gpu"):
            reason = _fails_to_compile(operation, candidate, choice.device, args, kwargs)
        if reason is None:
            if reasons:
                _log.info("%s uses %s (%s)", operation, candidate.name, "; ".join(reasons))
            choice.remember(operation, candidate.name, "; ".join(reasons))
            return candidate.run(*args, **kwargs)
        reasons.append(f"not {candidate.name}: {reason}")
    raise UnsupportedError(f"{operation}: no implementation can run this call ({'; '.join(reasons)})")


def _fails_to_compile(
    operation: str, kernel: Implementation, device: jax.Device | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """What the compiler says against a kernel on arguments of these shapes, or None if it takes them."""
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    described = tuple(
        # Not by its attributes: types of numbers, such as `out_dtype`, have a dtype, too.
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
        else leaf
        for leaf in leaves
    )
    return _try(operation, kernel, device, described, structure)


@functools.cache
def _try(operation: str, kernel: Implementation, device: Any, described: tuple[Any, ...], structure: Any) -> str | None:
    arrays = [i for i, leaf in enumerate(described) if isinstance(leaf, jax.ShapeDtypeStruct)]
    sharding = None if device is None else SingleDeviceSharding(device)

    def run(values):
        leaves = list(described)
        for i, value in zip(arrays, values, strict=True):
            leaves[i] = value
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return kernel.run(*args, **kwargs)

    def attempt() -> None:
        shapes = [jax.ShapeDtypeStruct(described[i].shape, described[i].dtype, sharding=sharding) for i in arrays]
        if device is None:
            platform = "cuda" if kernel.platform == "gpu" else str(kernel.platform)
            jax.jit(run).trace(shapes).lower(lowering_platforms=(platform,))
            return
        # Pallas may ask what device this is for: the mesh knows, also where the device is described only.
        with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
            # Which library kernel is fastest does not matter here, and could not be measured without the device.
            options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if kernel.platform == "gpu" else {}
            jax.jit(run).lower(shapes).compile(options)

    try:
        # A thread of its own: this one may be tracing under a mesh, of which the attempt must know nothing.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(attempt).result()
    except Exception as error:  # whatever a compiler raises: the operation has another implementation
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        _log.warning("%s does not use %s, which fails to compile: %s", operation, kernel.name, reason)
        return f"it fails to compile: {reason}"
    return None
