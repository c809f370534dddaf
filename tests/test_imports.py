"""Which package may import which: imports only point down (docs/architecture.md)."""

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels_pallas", "mamba_jax", "checkpoints", "serving"]
OUTSIDE = {"benchmarks", "docs", "tests"}  # in no wheel
BELOW = {
    "kernels_pallas": set(),
    "mamba_jax": {"kernels_pallas"},
    "checkpoints": {"mamba_jax"},
    "serving": {"mamba_jax", "checkpoints"},
}
# `mamba_jax.load` is a door to the loader for people who import the library: imported when called only.
LAZY_DOORS = {("mamba_jax/__init__.py", "checkpoints")}
DEVICE = {"jax", "jaxlib", "flax", "orbax", "ml_dtypes", *ROOMS} - {"serving"}

FILES = ("serving.config", "serving.settings", "serving.compatibility")
# Each folder of `serving` and the others that its own files import. The files above have rows of
# their own; `""`, the package itself, says what users import from it. What is below `serving/core` has its own table.
SERVING = {
    "core": set(),
    "settings": {"core"},
    "config": {"core", "settings"},
    "compatibility": {"config"},
    "vllm": {"config", "settings"},
    "state_transfer": {"core"},
    "tiers": {"core", "state_transfer"},
    "engine": {"compatibility", "config", "core", "settings", "state_transfer", "tiers", "vllm"},
    "": {"config", "core", "engine"},
    "hosts": {"config", "engine", "settings"},
    "tunix": {"engine"},
    "capacity": {"config", "engine"},
    "api": {"config", "core", "engine"},
    "api/http/protocol": {"engine"},
    "api/http": {"config", "core", "engine", "api", "api/http/protocol", "settings"},
    "split": {"core", "engine", "api/http", "state_transfer", "settings"},
    "split/http": {"compatibility", "config", "core", "engine", "api/http", "api/http/protocol", "split"},
    "split/router": {"core", "api", "api/http", "api/http/protocol", "split", "split/http"},
    "split/ray": {"config", "api/http", "split", "split/http", "split/router"},
    "bench": {"", "settings"},
    "check": {"bench", "config", "engine"},
    "cli": {"check", "compatibility", "config", "engine", "capacity", "api", "api/http", "split", "split/http"}
    | {"core", "hosts", "settings", "split/router", "vllm"},
}

# The order below four of these folders: their own folders, and each of the files next to those, but for `__init__.py`.
# Each imports only what stands left of a `<` before it.
PARTS = {
    "serving.core": "errors load_balancing < config stats < cache < tiers < requests < planning < scheduler",
    "serving.engine": "fair_lru stats compiled_programs < structured < requests < steps < control < engine"
    " < assembly changes engine_thread < replicas < async_engine llm",
    "serving.api.http": "json_values protocol settings < errors parsing < text < context < connection"
    " < logprobs generation < apis limits < endpoints < app",
    "serving.cli": "jax_import measures options < bench evaluate models generation serve training < main < __main__",
}


@functools.cache
def statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements of a file, with whether each stands inside a function."""
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    for node, lazy in nodes:  # which grows; expressions import nothing
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        nodes += [(child, inside) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    found = [(node, lazy) for node, lazy in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(getattr(node, "level", 0) for node, _ in found), f"{path} has a relative import"
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, with whether the import stands inside a function."""
    for node, lazy in statements(path):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        yield from ((name, lazy) for name in names)


def folder_of(module: str) -> str:
    """The folder under `serving` that a module is in; for all that is below a package of `PARTS`, that package."""
    path = ROOT.joinpath(*module.split("."))
    folder = str((path if path.is_dir() else path.parent).relative_to(ROOT / "serving"))
    if folder == ".":
        return module.removeprefix("serving.") if module in FILES else ""
    whole = (package.removeprefix("serving.").replace(".", "/") for package in PARTS)
    return next((each for each in whole if folder.startswith(f"{each}/") and folder not in SERVING), folder)


def arrows() -> Iterator[tuple[str, str, str]]:
    """Imports from one folder of `serving` to another, those for type checking and inside functions included."""
    for path in (ROOT / "serving").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        here = folder_of(name.removesuffix(".py").replace("/", "."))
        for module, _ in imports(path):
            if module.split(".")[0] == "serving" and (there := folder_of(module)) != here:
                yield here, there, f"{name} imports {module}"


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_only_run_down(room):
    wrong = []
    for path in (ROOT / room).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for module, lazy in imports(path):
            other = module.split(".")[0]
            if other in OUTSIDE | set(ROOMS) - {room} - BELOW[room] and not (lazy and (name, other) in LAZY_DOORS):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_folders_of_serving_import_what_the_table_says():
    found: dict[str, set[str]] = {folder: set() for folder in SERVING}
    for here, there, _ in arrows():
        found[here].add(there)
    assert found == SERVING


@pytest.mark.parametrize("package", PARTS)
def test_parts_of_a_package_import_what_is_below_them(package):
    levels = [set(level.split()) for level in PARTS[package].split(" < ")]
    allowed = {part: set().union(*levels[:height], {part}) for height, level in enumerate(levels) for part in level}
    found: dict[str, set[str]] = {}
    for name, modules in module_imports().items():
        if here := part_of(package, name):
            found.setdefault(here, set()).update(filter(None, (part_of(package, module) for module in modules)))
    assert found.keys() == allowed.keys()
    assert not {part: wrong for part, others in found.items() if (wrong := others - allowed[part])}


def part_of(package: str, module: str) -> str | None:
    """The folder of a package that a module is in, or the file next to the folders; `None` outside the package."""
    return module.removeprefix(package).strip(".").partition(".")[0] if f"{module}.".startswith(f"{package}.") else None


@functools.cache
def module_imports() -> dict[str, set[str]]:
    """For each module which others it imports when it is loaded, or for type checking only."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    found = {}
    for name, path in names.items():
        modules: set[str] = set()
        for node in (node for node, lazy in statements(path) if not lazy):
            if isinstance(node, ast.ImportFrom):
                # A name imported from a package may be a module of it.
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                modules |= inner & names.keys() or {node.module or ""}
            else:
                modules |= {alias.name for alias in node.names}
        found[name] = modules & names.keys() - {name}
    return found


@pytest.mark.parametrize("graph", [lambda: SERVING, module_imports], ids=["folders", "modules"])
def test_none_import_each_other(graph):
    graphlib.TopologicalSorter(graph()).prepare()  # a `CycleError` lists those of a circle


def below(folder: str) -> Iterator[tuple[str, str]]:
    """The files of a folder and those below it, with each module that they import."""
    for path in (ROOT / folder).rglob("*.py"):
        yield from ((str(path.relative_to(ROOT)), module) for module, _ in imports(path))


def test_host_policy_has_no_device_code():
    found = [*below("serving/core")]
    assert found
    assert not [row for row in found if row[1].split(".")[0] in DEVICE]


def test_operations_import_jax_only():
    allowed = {"jax", "jaxlib", "numpy", "jaxtyping", "kernels_pallas", "ml_dtypes"} | set(sys.stdlib_module_names)
    assert not [row for row in below("kernels_pallas") if row[1].split(".")[0] not in allowed]
