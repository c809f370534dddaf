"""`jax.jit` for tests, whose programs are stored on disk: only the first run on a machine traces, lowers and compiles.

A program is found by what it follows from: the sources of the packages and of the tests, the traced function with what
it encloses, options, arguments' shapes, and settings. Where that cannot be told, or while a test replaces something
that may be traced, it is plain `jax.jit`.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax._src.config import trace_context
from jax._src.core import trace_state_clean
from jax.sharding import Mesh, Sharding, get_abstract_mesh

from kernels_pallas import dispatch
from mamba_jax.kernel_check.values import Values
from mamba_jax.program_cache import look_of
from serving.engine.compiled_programs import KeptPrograms, keep_programs
from serving.state_transfer.identity import source_digest
from tests.support.replaced import replaced

PLAIN = jax.jit
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
TESTS = Path(__file__).parents[1]
SOURCES = ("kernels_pallas", "mamba_jax", "checkpoints", "serving")
SIMPLE = (bool, int, float, complex, str, bytes, types.EllipsisType, np.dtype, np.generic, enum.Enum)


_made: weakref.WeakSet[StoredJit] = weakref.WeakSet()


class _UnknownError(Exception):
    """What a program follows from cannot be told."""


class StoredJit:
    """A function that is compiled as `jax.jit` compiles it."""

    def __new__(cls, function: Any = None, **options: Any) -> Any:
        return functools.partial(cls, **options) if function is None else super().__new__(cls)

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._plain = PLAIN(function, **options)
        self._function, self._options = function, options
        self._programs: dict[Any, jax.stages.Compiled | None] = {}
        functools.update_wrapper(self, function)
        _made.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    @staticmethod
    def cache_clear() -> None:
        """Forget the programs of all such functions, which take memory maps."""
        for each in list(_made):
            each._programs.clear()

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain.lower(*args, **kwargs) if get_abstract_mesh().size > 1 else _Lowered(self, args, kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent, named, fixed = self._divided(args, kwargs)
        program = None
        if trace_state_clean() and all(map(_is_stored_with, jax.tree.leaves((sent, named)))):
            key = look_of((sent, named)), repr(fixed), trace_context()
            if key not in self._programs:
                try:
                    self._programs[key] = self._find(args, kwargs, sent, named, fixed)
                except _UnknownError:
                    self._programs[key] = None
            program = self._programs[key]
        return self._plain(*args, **kwargs) if program is None else program(*sent, **named)

    def _divided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments that a program takes by place and by name, and those for which it is made."""
        names, places = (self._options.get(f"static_{kind}") or () for kind in ("argnames", "argnums"))
        names = {names} if isinstance(names, str) else set(names)
        places = {places} if isinstance(places, int) else set(places)
        if names or places:
            parameters = list(inspect.signature(self._function).parameters)
            names |= {parameters[place] for place in places}
            places = {parameters.index(name) for name in names}
        sent = tuple(value for place, value in enumerate(args) if place not in places)
        named = {name: value for name, value in kwargs.items() if name not in names}
        fixed = {place: value for place, value in enumerate(args) if place in places}
        return sent, named, fixed | {name: value for name, value in kwargs.items() if name in names}

    def _find(self, args: Any, kwargs: Any, sent: Any, named: Any, fixed: Any, options: Any = None) -> Any:
        """The program for such arguments; raises `_UnknownError` if it cannot be told by what it is found."""
        leaves, structure = jax.tree.flatten((sent, named))
        choice = dispatch._current.get() or dispatch.KernelChoice()
        if replaced or choice.seen is not None or get_abstract_mesh().size > 1:
            raise _UnknownError
        if not trace_state_clean() or not all(map(_is_stored_with, leaves)):
            raise _UnknownError
        try:
            text = _text([self._function, fixed], ())
        except RecursionError as error:
            raise _UnknownError from error
        text = f"{text}\n{choice.description}\n{_without_addresses(repr(trace_context()))}"
        kept = copy.copy(_kept())
        if kept is None:
            raise _UnknownError
        kept._read = lambda path: _read(path) if path.exists() else None  # type: ignore[method-assign]
        called = f"{_structure(structure)}\n{_text([self._options, options or {}], ())}"
        kept._description += f"\n{text}\n{called}"
        kept._surroundings += f"\n{called}"  # two programs of one text may differ in the compiler's options

        def lower() -> jax.stages.Lowered:
            # As another function: what JAX has read from its own cache for this one cannot be stored.
            fresh = functools.wraps(self._function)(lambda *args, **kwargs: self._function(*args, **kwargs))
            lowered: jax.stages.Lowered = PLAIN(fresh, **self._options).lower(*args, **kwargs)
            divided = lowered.compiler_ir().operation.attributes["mhlo.num_partitions"]
            if divided.value > 1:  # a program is read back for one device, and for several XLA ends the process
                raise _UnknownError
            return lowered

        return kept.find((leaves,), lower, options or {}, choice)


class _Lowered:
    """A program as `jax.stages.Lowered`, which is traced and lowered once it has to be."""

    def __init__(self, jit: StoredJit, args: Any, kwargs: Any) -> None:
        within = contextvars.copy_context().run
        self._lower = functools.cache(lambda: within(jit._plain.lower, *args, **kwargs))
        self._find = functools.partial(within, jit._find, args, kwargs, *jit._divided(args, kwargs))
        self._settings = trace_context()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lower(), name)

    def compile(self, compiler_options: Any = None) -> jax.stages.Compiled:
        if jax.config.values["jax_enable_compilation_cache"]:  # else for a store, which cannot keep what is read here
            assert trace_context() == self._settings
            with contextlib.suppress(_UnknownError):
                return self._find(compiler_options)
        return self._lower().compile(compiler_options)


def late(function: Any, **options: Any) -> Any:
    """`jax.jit` for functions of a test module: a `StoredJit` wherever that is in use."""
    forms = {form: form(function, **options) for form in (PLAIN, StoredJit)}
    return functools.wraps(function)(lambda *args, **kwargs: forms[jax.jit](*args, **kwargs))


def _is_stored_with(leaf: Any) -> bool:
    """Whether a program with such an argument may be stored: an array of the host, or of the first device."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        first = leaf.sharding is None or leaf.sharding.device_set == set(jax.local_devices()[:1])
        return not isinstance(leaf, jax.core.Tracer) and first
    return isinstance(leaf, np.ndarray | np.generic)  # a number's type is weak


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Within, `jax.jit` is `StoredJit`."""
    jax.jit = StoredJit  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        jax.jit = PLAIN


@functools.cache
def _kept() -> KeptPrograms | None:
    """Where programs of the first device are."""
    tests = hashlib.sha256()
    for path in sorted(TESTS.rglob("*.py")):
        tests.update(path.read_bytes())
    described = f"{source_digest(SOURCES)} {tests.hexdigest()} optax {version('optax')}"
    return keep_programs(SimpleNamespace(devices=jax.local_devices()[:1], description=described))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _read(path: Path) -> jax.stages.Compiled | None:
    """A stored program, read once for all functions that are compiled to it."""
    return _kept()._read(path)  # type: ignore[union-attr]


def _text(value: Any, within: tuple[int, ...]) -> str:
    """What a program may follow from of a value: equal texts, equal programs."""
    if value is None or isinstance(value, SIMPLE):
        return f"{type(value).__name__} {value!r}"
    if id(value) in within:
        raise _UnknownError
    part = functools.partial(_text, within=(*within, id(value)))
    if _is_found_by_name(value):
        return f"{value.__module__}.{value.__qualname__}"
    match value:
        case types.ModuleType():
            return value.__name__
        case tuple() | list():
            return f"{type(value).__qualname__}[{', '.join(map(part, value))}]"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(part, value)))}}}"
        case dict():
            return f"{{{', '.join(f'{part(key)}: {part(each)}' for key, each in value.items())}}}"
        case functools.partial():
            return f"partial {part((value.func, value.args, value.keywords))}"
        case types.MethodType():
            return f"{part(value.__func__)} of {part(value.__self__)}"
        case types.FunctionType():
            try:
                held = [cell.cell_contents for cell in value.__closure__ or ()]
            except ValueError as error:  # a cell that is yet empty
                raise _UnknownError from error
            return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)} " + part(
                [held, value.__defaults__, value.__kwdefaults__]
            )
        case StoredJit():
            return f"jit {part((value._function, value._options))}"
        case np.ndarray() | jax.Array():
            if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and len(value.devices()) > 1):
                raise _UnknownError
            return f"{value.dtype}{value.shape} {hashlib.sha256(np.asarray(value).tobytes()).hexdigest()}"
        case Values():
            return f"values {part(vars(value))}"
        case jax.ShapeDtypeStruct() | nnx.GraphDef():
            return _without_addresses(repr(value))
        case Mesh() | Sharding():
            devices = value.devices.flat if isinstance(value, Mesh) else value.device_set
            if list(devices) != jax.local_devices()[:1]:
                raise _UnknownError
            return repr(value)
        case nnx.Module():
            graph, state = nnx.split(value)
            leaves = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}
            return f"{_without_addresses(repr(graph))} {part(leaves)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and _is_found_by_name(type(value)):
        return f"{type(value).__qualname__} {part({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})}"
    raise _UnknownError


def _is_found_by_name(value: Any) -> bool:
    """Whether a value is one that the sources define, outside of any function."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for each in name.split(".") if isinstance(name, str) and found is not None else ():
        found = getattr(found, each, None)
    return name is not None and found is value


def _without_addresses(text: str) -> str:
    if "<locals>" in text or "<lambda>" in text or "..." in text:
        raise _UnknownError  # it does not tell what it stands for
    return ADDRESS.sub("", text)


def _structure(structure: Any) -> str:
    """The structure of arguments, which a stored program must take as it is."""
    try:
        same = pickle.loads(pickle.dumps(structure)) == structure
    except Exception as error:  # a function without a name, for example
        raise _UnknownError from error
    if not same:
        raise _UnknownError
    return _without_addresses(str(structure))


def _code(code: types.CodeType) -> str:
    constants = [_code(each) if isinstance(each, types.CodeType) else _text(each, ()) for each in code.co_consts]
    parts = [code.co_code.hex(), *code.co_names, *code.co_freevars, *constants]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
