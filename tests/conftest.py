"""Shared by all tests: eight host devices, exact float32 dots, and shape checks at the boundaries of the operations."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before JAX is imported: tests of sharding need more than one device, and a CPU can play eight.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests compile the same small programs, in several processes at once and run after run: they share them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "mamba-jax-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest
from jaxtyping import install_import_hook

MAPS = Path("/proc/self/maps")

# Every annotated array argument of an operation is checked for shape and dtype, in tests only.
_hook = install_import_hook("kernels_pallas", "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=20_000, help="how many schedules the fuzz tests draw in all")
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _few_memory_maps() -> Iterator[None]:
    """Drop compiled programs between files, once they hold many memory maps.

    XLA's CPU programs take a handful of maps each, a Linux process may have 65,530, and one more is a crash without a
    word. Created first and so torn down last: by then a file's own engines are gone.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 8_000:
        gc.collect()
        jax.clear_caches()
        gc.collect()
