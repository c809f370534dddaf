"""The rooms and who may import whom: arrows only run down (docs/architecture.md)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels_pallas", "mamba_jax", "checkpoints", "serving"]
BELOW = {
    "kernels_pallas": set(),
    "mamba_jax": {"kernels_pallas"},
    "checkpoints": {"mamba_jax"},
    "serving": {"mamba_jax", "checkpoints"},
}
# `mamba_jax.load` is a door to the loader for people who import the library: imported when called only.
LAZY_DOORS = {("mamba_jax/__init__.py", "checkpoints")}
DEVICE = {"jax", "jaxlib", "flax", "orbax", "ml_dtypes", *ROOMS} - {"serving"}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Top-level packages that a file imports, with whether the import stands inside a function."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT).with_suffix("").parts)
            base = ".".join(package[: -node.level]) if node.level else ""
            found.append((f"{base}.{node.module or ''}".strip("."), id(node) in inside))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_only_run_down(room):
    wrong = []
    for path in (ROOT / room).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for module, lazy in imports(path):
            other = module.split(".")[0]
            if other in set(ROOMS) - {room} - BELOW[room] and not (lazy and (name, other) in LAZY_DOORS):
                wrong.append(f"{name} imports {module}")
    assert not wrong


def test_host_policy_has_no_device_code():
    core = ROOT / "serving" / "core"
    files = list(core.rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module, _ in imports(path)
        if module.split(".")[0] in DEVICE or (module.startswith("serving") and not module.startswith("serving.core"))
    ]
    assert not wrong


def test_operations_import_jax_only():
    allowed = {"jax", "jaxlib", "numpy", "jaxtyping", "kernels_pallas", "ml_dtypes"}
    standard = set(__import__("sys").stdlib_module_names)
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / "kernels_pallas").rglob("*.py")
        for module, _ in imports(path)
        if module.split(".")[0] not in allowed | standard
    }
    assert not wrong
