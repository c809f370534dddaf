"""Shared by all tests: eight host devices, exact float32 dots, and shape checks at the boundaries of the operations."""

import contextlib
import ctypes
import gc
import logging
import os
import sys
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

import tests.support.array_annotations  # noqa: F401 - the hook below looks it up by name

MAPS, STATUS = Path("/proc/self/maps"), Path("/proc/self/status")
KEPT_BYTES, MOST_KEPT_BYTES, FILE_BYTES = 1 << 30, 2 << 30, 5 << 29
"""What a worker may carry from one file to the next and from one test to the next, and what a file may add to that."""

# Every annotated array is checked for shape and dtype, in tests only.
_hooks = (
    install_import_hook("kernels_pallas", "beartype.beartype"),
    install_import_hook("mamba_jax", "tests.support.array_annotations.arrays_checked"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=20_000, help="how many schedules the fuzz tests draw in all")
    parser.addoption("--minutes", type=float, default=60.0, help="how long the soak test of the split's faults runs")
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop compiled programs between files once they take much memory, and hold each file to its share.

    Two workers have to fit into a laptop of 8 GB; whole programs of large models, with --slow, need not. XLA's CPU
    programs also take a handful of memory maps each: a Linux process may have 65,530, and one more is a crash without
    a word.

    Created first and so torn down last: by then a file's own engines are gone.
    """
    _restart_peak()
    before = _memory("VmRSS")
    yield
    added = _memory("VmHWM") - before
    if _memory("VmRSS") > KEPT_BYTES or (MAPS.exists() and MAPS.read_bytes().count(b"\n") > 8_000):
        for name, module in list(sys.modules.items()):
            if name.startswith("tests."):
                for value in list(vars(module).values()):
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()
        _drop_programs()
    assert request.config.getoption("--slow") or added < FILE_BYTES, (
        f"the tests of this file took {added >> 20:,} MiB: divide it, or compile fewer programs"
    )


@pytest.fixture(autouse=True)
def _loggers_left_as_they_were() -> Iterator[None]:
    """The command line sends its loggers to the stderr of that moment, which a test's capture closes at its end."""
    loggers = [logging.getLogger(name) for name in ("serving", "checkpoints", "uvicorn")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _bounded_memory_within_a_file(_bounded_memory: None) -> Iterator[None]:
    """The same between tests that each compile much; what a file's own engines have stays."""
    yield
    if _memory("VmRSS") > MOST_KEPT_BYTES:
        _drop_programs()


def _drop_programs() -> None:
    gc.collect()
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed


def _memory(field: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at most since `_restart_peak`. 0 where there is no /proc."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def _restart_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
