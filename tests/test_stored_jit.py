"""Programs that tests store are found again, by all that they follow from."""

import random

import jax
import numpy as np
import pytest

from mamba_jax.sharding import make_mesh
from mamba_jax.sharding.axis import split_last, use_mesh
from serving.engine.compiled_programs import _jax_cache
from tests.support import stored_jit

TRACED: list[float] = []
OFFSET = 1.0
FACTOR = random.SystemRandom().random()  # no run before this one has stored it


def scaled(factor: object, **options: object) -> stored_jit.StoredJit:
    def run(x: jax.Array, times: int = 1) -> jax.Array:
        TRACED.append(OFFSET)
        return x * factor * times + OFFSET

    return stored_jit.StoredJit(run, **options)


@pytest.fixture(autouse=True)
def _one_is_stored() -> None:
    np.testing.assert_allclose(scaled(FACTOR)(np.ones(3)), [FACTOR + 1] * 3)
    TRACED.clear()


def test_the_same_is_traced_once() -> None:
    np.testing.assert_allclose(scaled(FACTOR)(2 * np.ones(3)), [2 * FACTOR + 1] * 3)
    assert not TRACED
    with _jax_cache.off():  # another store compiles it, which cannot keep what this one has read
        scaled(FACTOR).lower(np.ones(3)).compile()
    assert TRACED


@pytest.mark.parametrize("factor", [1 + FACTOR, FACTOR * np.ones(3), object()], ids=["number", "array", "unknown"])
def test_what_is_enclosed_matters(factor: object) -> None:
    if type(factor) is object:
        with pytest.raises(TypeError):
            scaled(factor)(np.ones(3))
    else:
        np.testing.assert_allclose(scaled(factor)(np.ones(3)), np.ones(3) * factor + 1)
    assert TRACED


def test_arguments_and_options_matter() -> None:
    scaled(FACTOR)(np.ones(4))
    run = scaled(FACTOR, static_argnames="times")
    np.testing.assert_allclose([run(np.ones(3), 2)[0], run(np.ones(3), times=3)[0]], [2 * FACTOR + 1, 3 * FACTOR + 1])
    with jax.default_matmul_precision("float32"):
        scaled(FACTOR)(np.ones(3))
    scaled(FACTOR, compiler_options={"xla_backend_optimization_level": 3})(np.ones(3))
    assert len(TRACED) == 5


def test_what_a_test_replaces_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.OFFSET", 5.0)
    np.testing.assert_allclose(scaled(FACTOR)(np.ones(3)), [FACTOR + 5] * 3)
    monkeypatch.undo()
    np.testing.assert_allclose(scaled(FACTOR)(np.ones(3)), [FACTOR + 1] * 3)
    assert TRACED == [5.0]


def test_programs_of_several_devices_are_not_stored() -> None:
    with use_mesh(make_mesh(2)):
        for _ in range(2):
            run = stored_jit.StoredJit(lambda x: split_last(x * FACTOR) if not TRACED.append(0.0) else x)
            np.testing.assert_allclose(run(np.ones(4)), [FACTOR] * 4)
    assert len(TRACED) == 2
