"""Selects the implementation of an operation. A named choice is strict; the automatic one falls back and reports why.

The automatic choice is the first implementation for the target platform that supports the call. A Pallas kernel must
also compile: it is first compiled alone, for the shapes of the call. If the compiler rejects it, a warning is logged
and another implementation is used. CPUs use native operations (`native`), which are compiled when the package is
installed; Pallas kernels run there only if named (`..._interpreted`), in Pallas' interpreter.
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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding

from kernels_pallas import native

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """The requested implementation does not exist or does not support this call."""


def _always(*args: Any, **kwargs: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of an operation. `unsupported(*args, **kwargs)` returns why it cannot run a call, or None."""

    name: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = _always
    platform: str | None = None
    """The only supported platform: "tpu", "gpu" or "cpu". None for plain JAX, which runs on all platforms."""
    automatic: bool = True
    """Whether the automatic choice may select it."""
    own_derivative: bool = False
    """Whether JAX can differentiate it; its derivative is otherwise that of the last one of the operation's table."""

    def why_not(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Returns why it cannot run a call, or None. No Pallas kernel takes empty arrays."""
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if hasattr(leaf, "shape")]
        if self.name.startswith("pallas") and any(0 in array.shape for array in arrays):
            return "an array is empty"
        return self.unsupported(*args, **kwargs)


def kernels(
    platform: str, module: Any, operation: str, *, own_derivative: bool = False
) -> tuple[Implementation, Implementation]:
    """Returns two implementations of a kernel `module.<operation>`: compiled for `platform`, interpreted on any."""
    compiled = Implementation(
        f"pallas_{platform}", getattr(module, operation), module.unsupported, platform, own_derivative=own_derivative
    )
    interpreted = functools.partial(compiled.run, interpret=True)
    name = f"{compiled.name}_interpreted"
    return compiled, dataclasses.replace(compiled, name=name, run=interpreted, platform=None, automatic=False)


class KernelChoice:
    """The target of compilation and the implementations of operations; records the choices and their reasons.

    choice = KernelChoice(named={"recurrence_scan": "xla"})
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
        refused: Mapping[tuple[str, str], str] | None = None,
        seen: Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            platform: "tpu", "gpu" or "cpu", the target of compilation; by default that of the local devices.
            device: the device whose compiler tests kernels; it may be a description only
                (`jax.experimental.topologies`). By default the first local device, if it is of `platform`; otherwise
                kernels are only lowered, which finds most errors.
            named: implementations by operation, or one name for all operations that have it.
            refused: kernels that the automatic choice leaves out, as (operation, implementation), with the reasons.
            seen: called in place of an implementation, with the operation, its candidates, and the arguments by place
                and by name; returns the result.
        """
        self.seen, self.refused = seen, refused or {}
        self.platform = platform or jax.default_backend()
        if device is None and self.platform == jax.default_backend():
            device = jax.local_devices()[0]
        self.device = device
        self.named = named or {}
        self.chosen: dict[str, dict[str, str]] = {}
        """The implementations in use, with reasons, by operation."""

    @classmethod
    def parse(cls, text: str, **kwargs: Any) -> "KernelChoice":
        """Parses a choice: "auto", a name for all operations that have it, or "scan=xla,update=pallas_tpu".

        Raises:
            UnsupportedError: the text has another form.
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
        """Applies this choice to operations of the current thread."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @property
    def description(self) -> str:
        """The identity of the choice: with equal descriptions, the same source compiles to the same program."""
        library = f" native {native.fingerprint()} {self.products()}" if self.platform == "cpu" else ""
        refused = f" without {sorted(self.refused)}" if self.refused else ""
        return f"{self.platform} {self.named!r}{refused}{library}"

    def products(self) -> str | None:
        """Returns one line on how products with bfloat16 weights run on CPU; None elsewhere or without native code."""
        if self.platform != "cpu" or (instructions := native.instructions()) is None:
            return None
        used = f"C++ products use the instruction set {instructions}"
        if native.multiplies_bfloat16():
            return f"{used}; XLA multiplies more than {native.few_rows()} rows in bfloat16"
        return f"{used} and widen bfloat16 weights to float32 for any number of rows (no bfloat16 instructions)"

    def report(self) -> str:
        """Returns one line with the implementation of each operation traced so far, and why it is not a kernel."""
        parts = []
        for operation, chosen in sorted(dict(self.chosen).items()):
            by = " and ".join(name + (f" ({why})" if why else "") for name, why in sorted(dict(chosen).items()))
            parts.append(f"{operation} by {by}")
        if unused := sorted(set(self.named) - set(self.chosen)) if isinstance(self.named, Mapping) else []:
            parts.append(f"named, but not in use: {', '.join(unused)}")
        return f"kernels for {self.platform}: " + (", ".join(parts) or "nothing traced yet")


_current: contextvars.ContextVar[KernelChoice | None] = contextvars.ContextVar("kernel_choice", default=None)


def device_kind() -> str:
    """Returns the device kind that programs are compiled for; empty if it is not set."""
    choice = _current.get() or KernelChoice()
    return choice.device.device_kind if choice.device is not None else ""


def platform() -> str:
    """Returns the platform that programs are compiled for: "tpu", "gpu" or "cpu"."""
    return (_current.get() or KernelChoice()).platform


def differentiable(run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, a function of arrays, with the derivative of `plain`, which computes the same in plain JAX."""
    function: Any = jax.custom_vjp(run)
    function.defvjp(
        lambda *arrays: (run(*arrays), jax.vjp(plain, *arrays)[1]), lambda pull, change: tuple(pull(change))
    )
    return function


def _run(chosen: Implementation, plain: Implementation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs the chosen implementation, with the derivative of the plain one, which keeps nothing but the arguments."""
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    if chosen is plain or chosen.own_derivative or not arrays:
        return chosen.run(*args, **kwargs)
    run, derived = (_of_arrays(one.run, leaves, structure, arrays) for one in (chosen, plain))
    return differentiable(run, jax.checkpoint(derived))(*(leaves[i] for i in arrays))


def _of_arrays(
    run: Callable[..., Any], leaves: Sequence[Any], structure: Any, arrays: Sequence[int]
) -> Callable[..., Any]:
    """Returns `run` as a function of the leaves with the numbers `arrays`; its other arguments stay as they are."""

    def call(*values: Any) -> Any:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args, kwargs = jax.tree.unflatten(structure, filled)
        return run(*args, **kwargs)

    return call


def named_choice() -> Mapping[str, str] | str:
    """The implementations that the current choice names (`KernelChoice.named`)."""
    choice = _current.get()
    return {} if choice is None else choice.named


def call(operation: str, candidates: Sequence[Implementation], name: str | None, *args: Any, **kwargs: Any) -> Any:
    """Runs `operation` with the implementation `name`, or, for None, with the first candidate that supports the call.

    The last candidate is plain JAX, and gives the others their derivatives.

    Raises:
        UnsupportedError: `name` is unknown or cannot run this call, or no candidate can.
    """
    choice = _current.get() or KernelChoice()
    if choice.seen is not None:
        return choice.seen(operation, tuple(candidates), args, kwargs)
    of_user, known, by_caller = choice.named, [c.name for c in candidates], name is not None
    if isinstance(of_user, str):  # for all operations that have it
        name = name or (of_user if of_user in known else None)
    else:
        name = name or of_user.get(operation)
    if name is not None:
        if name not in known:
            raise UnsupportedError(f"{operation}: no implementation is called {name!r}; there are: {', '.join(known)}")
        chosen = candidates[known.index(name)]
        # A caller may compile for a platform that no choice is made for.
        elsewhere = not by_caller and chosen.platform not in (None, choice.platform)
        if reason := f"it runs on {chosen.platform} only" if elsewhere else chosen.why_not(args, kwargs):
            raise UnsupportedError(f"{operation}: {name} cannot run this call: {reason}")
        choice.chosen.setdefault(operation, {})[name] = "named"
        return _run(chosen, candidates[-1], args, kwargs)
    reasons: list[str] = []
    for candidate in candidates:
        if not candidate.automatic or candidate.platform not in (None, choice.platform):
            continue
        reason = choice.refused.get((operation, candidate.name)) or candidate.why_not(args, kwargs)
        if reason is None and candidate.platform in ("tpu", "gpu"):
            reason = _fails_to_compile(operation, candidate, choice.device, args, kwargs)
        if reason is None:
            if reasons:
                _log.info("%s uses %s (%s)", operation, candidate.name, "; ".join(reasons))
            choice.chosen.setdefault(operation, {})[candidate.name] = "; ".join(reasons)
            return _run(candidate, candidates[-1], args, kwargs)
        reasons.append(f"not {candidate.name}: {reason}")
    raise UnsupportedError(f"{operation}: no implementation can run this call ({'; '.join(reasons)})")


def _fails_to_compile(
    operation: str, kernel: Implementation, device: jax.Device | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns the compiler's error for a kernel with arguments of these shapes, or None if it compiles."""
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    # Tests types, not attributes: scalar types, such as `out_dtype`, also have a `dtype`.
    array = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    described = (jax.ShapeDtypeStruct(v.shape, v.dtype) if isinstance(v, array) else v for v in leaves)
    return _try(operation, kernel, device, tuple(described), structure)


_TYPICAL = {
    "tpu": AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu"),
    "gpu": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
}
"""Described to Pallas where programs are compiled for no device in particular."""


@functools.cache
def _try(operation: str, kernel: Implementation, device: Any, described: tuple[Any, ...], structure: Any) -> str | None:
    arrays = [i for i, leaf in enumerate(described) if isinstance(leaf, jax.ShapeDtypeStruct)]
    sharding = None if device is None else SingleDeviceSharding(device)
    run = _of_arrays(kernel.run, described, structure, arrays)

    def attempt() -> None:
        shapes = [jax.ShapeDtypeStruct(described[i].shape, described[i].dtype, sharding=sharding) for i in arrays]
        if device is None:
            platform = "cuda" if kernel.platform == "gpu" else str(kernel.platform)
            with jax.sharding.use_abstract_mesh(
                AbstractMesh((1,), ("device",), abstract_device=_TYPICAL[str(kernel.platform)])
            ):
                jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,))
            return
        # Pallas may query the target device. The mesh provides it, even if the device is only a description.
        with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
            # This test needs no autotuning of library kernels, which would require the device.
            options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if kernel.platform == "gpu" else {}
            jax.jit(run).lower(*shapes).compile(options)

    try:
        # Runs in a new thread: the current thread may be tracing under a mesh, which must not affect the attempt.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(attempt).result()
    except Exception as error:  # a compiler may raise anything, and another implementation exists
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        _log.warning("%s does not use %s, which fails to compile: %s", operation, kernel.name, reason)
        return f"it fails to compile: {reason}"
    return None
