"""Shared by all tests: eight host devices, a cache of compiled programs, the choice of tests, bounds on memory."""

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cpu_options, recorded_passes
from tests.support.lowering import forget_contexts, share_contexts
from tests.support.replaced import count_replacements
from tests.support.selection import full_tier, ignored, select

# Before JAX is imported. Tests of sharding need several devices. LLVM would optimize for longer than the tests compute.
CHOSEN_BY_USER = "XLA_FLAGS" in os.environ
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests of all processes, checkouts and runs share compiled programs. Keys cover what a program follows from, but not
# the kind of CPU: it is in the name, because machines may share a home directory.
LINES = CPUS.read_bytes().splitlines() if (CPUS := Path("/proc/cpuinfo")).exists() else []
CPU = hashlib.sha256(next((line for line in LINES if line.startswith(b"flags")), b""))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mamba-jax" / f"tests-{CPU.hexdigest()[:12]}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Each HTTP client reads all certificates it trusts, for as long as several requests take. No test needs one of them.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

count_replacements()
# Python's default, 700, takes a twentieth of the time of tests, and a sixth of that of collecting them.
gc.set_threshold(10_000, 10, 10)

MAPS, STATUS = Path("/proc/self/maps"), Path("/proc/self/status")
KEPT_BYTES, MOST_KEPT_BYTES, FILE_BYTES, MOST_LEFT_BYTES = 1 << 30, 3 << 29, 5 << 29, 3 << 29
"""What a worker may carry from one file to the next and from one test to the next, and what a file may add to that.
The first two count from what was left when the worker last dropped its programs, but at most from the last."""
LEFT_BYTES = pytest.StashKey[int]()
CACHE_BYTES = 3 << 30
"""Above this, the compiled programs whose last use is longest ago are deleted."""
LOGGERS = ("serving", "checkpoints", "uvicorn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests outside the default tier, but the slow")
    parser.addoption("--slow", action="store_true", help="run all tests, those marked slow included")
    parser.addoption("--examples", type=int, help="how many schedules the fuzz tests draw in all")
    parser.addoption("--minutes", type=float, default=60.0, help="how long each soak test of faults runs")
    parser.addoption("--skip-recorded", action="store_true", help="skip tests of kernels that .ci/passed.json has")
    parser.addoption("--record-passes", action="store_true", help="write what passes to .ci/passed.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.examples is None:
        config.option.examples = 20_000 if full_tier(config) else 400
    if not hasattr(config, "workerinput"):
        _bound_cache()
        if config.option.record_passes:
            config.pluginmanager.register(recorded_passes.PassRecorder(config))
    if full_tier(config):
        _check_annotations()
    else:  # files of the full tier would take more memory than they may
        gc.set_threshold(100_000, 20, 50)
    if cpu_options.EXIST and not CHOSEN_BY_USER and cpu_options.PATIENT not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {cpu_options.PATIENT}"
    # `--slow` has the emitters that users have.
    if cpu_options.EXIST and not (config.option.slow or CHOSEN_BY_USER or cpu_options.OLDER in os.environ["XLA_FLAGS"]):
        os.environ["XLA_FLAGS"] += f" {cpu_options.OLDER}"


def pytest_report_header(config: pytest.Config) -> str:
    tier = "all tests" if config.option.slow else "full tier" if config.option.full else "default tier"
    others = config.option.skip_recorded and recorded_passes.other_versions()
    run = f"; no recorded pass counts: {others}" if others else ""
    return f"{tier} (--full: all but the slow tests, --slow: all), {config.option.examples:,} schedules{run}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return ignored(collection_path, config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items)
    if config.option.skip_recorded:
        recorded_passes.skip_recorded(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and thousands of tests out of every later collection of garbage."""
    share_contexts()
    gc.collect()
    gc.freeze()
    session.config.stash[LEFT_BYTES] = _memory("VmRSS")


def _check_annotations() -> None:
    """Check the shape and dtype of every array that a function annotates."""
    import jaxtyping
    from jaxtyping import install_import_hook

    from tests.support.array_annotations import only_with_arrays

    jaxtyping.jaxtyped = only_with_arrays(jaxtyping.jaxtyped)

    imported = {"kernels_pallas", "mamba_jax"} & set(sys.modules)
    assert not imported, f"{imported} imported by a conftest.py or plugin, before annotations can be checked"
    install_import_hook("kernels_pallas", "beartype.beartype")
    install_import_hook("mamba_jax", "tests.support.array_annotations.arrays_checked")


def _bound_cache() -> None:
    """Make the cache's folder, and delete what is too much in it."""
    folder, total = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), 0
    with contextlib.suppress(OSError):  # JAX reports what it cannot save
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    for path, status in sorted(files, key=lambda file: max(file[1].st_atime, file[1].st_mtime), reverse=True):
        total += status.st_size
        if total > CACHE_BYTES:
            path.unlink(missing_ok=True)


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
    if _held(request.config) > KEPT_BYTES or _maps() > 20_000:
        _clear_test_caches()
        _drop_programs(request.config)
    assert request.config.getoption("--slow") or added < FILE_BYTES, (
        f"the tests of this file took {added >> 20:,} MiB: divide it, or compile fewer programs"
    )


@pytest.fixture(autouse=True, scope="module")
def _stored_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests of these folders compile is stored; not in the full tier, where tracing checks annotations."""
    if full_tier(request.config) or not {"kernels_pallas", "mamba_jax", "serving"} & set(request.path.parts):
        yield
        return
    from tests.support import stored_jit

    with stored_jit.in_use():
        yield


def _loggers_left_as_they_were() -> Iterator[None]:
    """The command line sends its loggers to the stderr of that moment, which a test's capture closes at its end."""
    loggers = map(logging.getLogger, LOGGERS)
    before = [(logger, [*logger.handlers], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


_loggers_after_a_test = pytest.fixture(autouse=True)(_loggers_left_as_they_were)
# Fixtures of a whole file that start a server or a command change the loggers outside of any test.
_loggers_after_a_file = pytest.fixture(autouse=True, scope="module")(_loggers_left_as_they_were)


@pytest.fixture(autouse=True)
def _bounded_memory_within_a_file(request: pytest.FixtureRequest, _bounded_memory: None) -> Iterator[None]:
    """The same between tests that each compile much; what a file's own fixtures have stays."""
    yield
    held = _held(request.config)
    if many := held > KEPT_BYTES and _maps() > 25_000:
        _clear_test_caches()
    most = KEPT_BYTES if request.node.get_closest_marker("fuzz") else MOST_KEPT_BYTES  # a trace may add a gigabyte
    if many or held > most:
        _drop_programs(request.config)


def _held(config: pytest.Config) -> int:
    """Bytes that this process has more than when it last dropped its programs."""
    return _memory("VmRSS") - min(config.stash[LEFT_BYTES], MOST_LEFT_BYTES)


def _maps() -> int:
    """The number of memory maps of this process; 0 if the system does not tell."""
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def _clear_test_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _drop_programs(config: pytest.Config) -> None:
    gc.collect()
    if jax := sys.modules.get("jax"):  # tests of policy alone do not import it
        jax.clear_caches()
        forget_contexts()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed
    config.stash[LEFT_BYTES] = _memory("VmRSS")


def _memory(field: str) -> int:
    """Bytes of this process by /proc: VmRSS now, VmHWM at most since `_restart_peak`. 0 where there is no /proc."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def _restart_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
