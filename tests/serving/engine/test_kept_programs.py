"""Compiled programs that outlive the process: what is taken from them, and when they must not be."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import serving.engine.compiled_programs as module
from kernels_pallas.dispatch import KernelChoice
from mamba_jax.batch import DecodeBatch
from mamba_jax.programs import StepPrograms
from serving.engine.compiled_programs import KeptPrograms, keep_programs
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.engines.shared_engines import SMALLEST, engines_of


@pytest.fixture(scope="module")
def engine():
    return engines_of(SMALLEST).engine("all")


@pytest.fixture
def fresh():
    with module._jax_cache.off():
        yield


OPTIONS = {"tile_size": 16, "compiler_options": QUICK_COMPILE, "greedy": True}


def programs_like(folder, compiled_for=None, **changes):
    """Programs that are kept in a folder; that of a decode step may be compiled for an engine."""
    programs = StepPrograms(engines_of(SMALLEST).model, **(OPTIONS | changes))
    programs.kept = KeptPrograms(folder, programs)
    if compiled_for is not None:
        programs.program(*copies(compiled_for), decode(compiled_for))
    return programs


def copies(engine):
    return jax.tree.map(lambda leaf: leaf.copy(), (engine.loop._make_store(), engine.loop._make_rows()))


def decode(engine, rows=1, drafts=0):
    width = engine.loop.scheduler.config.pages_per_row
    return DecodeBatch.empty(rows=rows, num_speculative_tokens=drafts, pages_per_row=width)


def test_the_second_start_compiles_nothing_and_computes_the_same(fresh, engine, tmp_path, monkeypatch):
    first, batch = programs_like(tmp_path), decode(engine)
    batch.row_id[0], batch.tokens[0, 0], batch.num_tokens[0], batch.write_slot[0, 0] = 1, 7, 1, 3
    batch.page_table[0, 0], batch.sample[0] = 1, True
    store, rows = copies(engine)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((store, rows)))
    expected = jax.tree.map(np.asarray, first.step(store, rows, batch))
    assert (first.kept.loaded, len(list(tmp_path.glob("*.program")))) == (0, 1)

    second = programs_like(tmp_path)
    monkeypatch.setattr(second, "lower", None)  # there is nothing to trace
    store, rows = copies(engine)
    result = second.step(store, rows, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, result), expected)
    assert (second.kept.loaded, second.compilations) == (1, 1)
    plain = StepPrograms(engines_of(SMALLEST).model)
    assert second.kernels.report() == first.kernels.report() != plain.kernels.report()
    # It still updates the store in place.
    assert store.hidden.is_deleted()
    assert rows.length.is_deleted()
    assert second.program(*copies(engine), batch).memory_analysis().alias_size_in_bytes >= whole


CHANGES = {
    "tile_size": lambda: {"tile_size": 32},
    "options": lambda: {"compiler_options": {}},
    "kernels": lambda: {"kernels": KernelChoice.parse("xla")},
    "greedy": lambda: {"greedy": False},
}


@pytest.mark.parametrize("what", [*CHANGES, "source", "jax", "environment", "rows", "store"])
def test_whatever_may_change_a_program_makes_it_another(engine, tmp_path, monkeypatch, what):
    def path(programs, changed=None):
        store, seats = engine.loop._store, engine.loop._rows
        if changed == "store":
            store = dataclasses.replace(store, hidden=store.hidden[:-1])
        arguments = (programs._weights, store, seats, decode(engine, 2 if changed == "rows" else 1))
        return programs.kept._place(arguments)

    one = path(programs_like(tmp_path))
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")  # planning sets it: no program for a CPU needs it
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.8")  # the command line sets it from `--memory-utilization`
    assert path(programs_like(tmp_path)) == one
    if what == "source":
        monkeypatch.setattr(module, "source_digest", lambda packages: "edited")
    if what == "environment":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with jax.default_matmul_precision("bfloat16" if what == "jax" else None):
        assert path(programs_like(tmp_path, **CHANGES.get(what, dict)()), what) != one


@pytest.mark.full
def test_programs_that_jax_has_cached_are_kept_whole(engine, tmp_path, monkeypatch):
    """XLA:CPU cannot write down what it has read itself: such a program would fail when it runs."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    module.compilation_cache.reset_cache()
    try:
        batch, results = decode(engine), []
        for keep in (False, True, True):
            programs = StepPrograms(engines_of(SMALLEST).model, **OPTIONS)
            store, rows = copies(engine)
            kept = keep_programs(programs) if keep else None
            programs.program(store, rows, batch)
            results.append(jax.tree.map(np.asarray, programs.step(store, rows, batch)))
        assert kept.loaded == 1
        assert any("cache" in path.name for path in tmp_path.iterdir() if path.is_file())
        jax.tree.map(np.testing.assert_array_equal, results[0], results[2])
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        module.compilation_cache.reset_cache()


@pytest.mark.full
def test_a_damaged_file_is_compiled_anew(fresh, engine, tmp_path, caplog):
    programs_like(tmp_path, engine)
    (path,) = tmp_path.glob("*.program")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert programs_like(tmp_path, engine).kept.loaded == 0
    assert "compiled again" in caplog.text
    assert programs_like(tmp_path, engine).kept.loaded == 1


def test_an_edit_that_changes_no_program_compiles_nothing(fresh, engine, tmp_path, monkeypatch):
    first, batch = programs_like(tmp_path, engine), decode(engine)
    monkeypatch.setattr(module, "source_digest", lambda packages: "edited")
    second = programs_like(tmp_path, engine)
    assert second.kept.loaded == 1
    assert second.kernels.report() == first.kernels.report()
    monkeypatch.setattr(module, "source_digest", lambda packages: "an operation has another name")
    renamed = programs_like(tmp_path)
    renamed.kernels.chosen["a new name"] = {"": "xla"}
    renamed.program(*copies(engine), batch)
    third = programs_like(tmp_path)
    monkeypatch.setattr(third, "lower", None)  # nor is anything traced again
    third.program(*copies(engine), batch)
    assert third.kernels.report() == renamed.kernels.report()
    # Programs with other options are others.
    find_small(programs_like(tmp_path, tile_size=8))
    find_small(fourth := programs_like(tmp_path, tile_size=64), xla_backend_optimization_level=1)
    assert (third.kept.loaded, fourth.kept.loaded) == (1, 0)


X = np.zeros(3)


def find_small(programs, seconds=0.0, **options):
    """Finds a program that compiles at once; to trace it takes `seconds`."""
    traced = jax.jit(jax.numpy.negative)
    return programs.kept.find((X,), lambda: time.sleep(seconds) or traced.lower(X), options, programs.kernels)


def test_two_threads_that_need_one_program_compile_it_once(fresh, tmp_path):
    both = [programs_like(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda programs: find_small(programs, 0.2), both))
    assert sorted(programs.kept.loaded for programs in both) == [0, 1]


def test_a_program_that_another_process_never_finishes_is_compiled_here(fresh, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_LONGEST_WAIT", 0.1)
    programs = programs_like(tmp_path)
    with module._locked(programs.kept._place((X,))):
        find_small(programs)
    assert "another process has had" in caplog.text
    assert len(list(tmp_path.glob("*.program"))) == 1


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="by others"):
        programs_like(tmp_path)


def test_old_programs_are_removed(tmp_path):
    tmp_path.chmod(0o700)
    old = tmp_path / "0.program"
    old.write_bytes(b"")
    module.os.utime(old, (0, 0))
    programs_like(tmp_path)
    assert not old.exists()
