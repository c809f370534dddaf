"""Every planted fault by its name in docs/mutations.md, with the files of the default tier that should detect it."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Planted:
    """A fault of any part of the project."""

    name: str
    text: str
    files: tuple[str, ...]
    """Test files and folders, the likeliest first."""
    plant: Callable[[Patch], None]


CORE = ("tests/serving/core",)
DEVICE = (
    "tests/serving/differential", "tests/mamba_jax/test_step.py", "tests/mamba_jax/test_step_drafts.py",
    "tests/mamba_jax/test_sampling.py", "tests/serving/engine",
)  # fmt: skip
SPLIT = ("tests/serving/split", "tests/serving/state_transfer")
TRAINING = ("tests/mamba_jax/train",)
CHECKPOINTS = ("tests/checkpoints",)
ADAPTERS = ("tests/checkpoints/test_adapter.py", "tests/mamba_jax/test_adapters.py")
HTTP = ("tests/serving/api",)
KERNELS = ("tests/kernels_pallas",)
MODELS = ("tests/mamba_jax/test_sampling.py", "tests/mamba_jax/test_step.py", "tests/mamba_jax/test_mixed_step.py")

OTHERS: list[Planted] = []
"""Those that are not in the tables of the host policy, the device and the split."""


def faults_like(name: str = "") -> dict[str, Planted]:
    """The faults of the kind that the name begins with, by name; all without a name. Imports what they change."""
    kinds = {"": _policy, "D": _device, "S": _split}
    kind = name.rstrip("0123456789")
    chosen = [kinds[kind]] if name and kind in kinds else [] if name else kinds.values()
    return {fault.name: fault for fault in [*(fault for kind in chosen for fault in kind()), *OTHERS]}


def _policy() -> Iterator[Planted]:
    from tests.serving.core.mutations import CORE as faults

    yield from (Planted(fault.name, fault.text, CORE, fault.plant) for fault in faults.values())


def _device() -> Iterator[Planted]:
    from tests.serving.differential import (  # noqa: F401
        adapter_faults,
        bit_faults,
        draft_faults,
        faults,
        replay_faults,
        structured_faults,
    )

    yield from (Planted(fault.name, fault.text, DEVICE, fault.plant) for fault in faults.planted().values())


def _split() -> Iterator[Planted]:
    from tests.serving.split.test_split_mutations import FAULTS

    for number, fault in enumerate(FAULTS, 1):
        yield Planted(f"S{number}", fault.text, SPLIT, lambda patch, fault=fault: fault.plant().__enter__())


def _fault(name: str, text: str, files: tuple[str, ...], where: str, change: Callable[[Any], Any]) -> None:
    """Adds a fault: `change(original)` in the place of "module:function" or "module:class.method"."""

    def plant(patch: Patch) -> None:
        module, path = where.split(":")
        owner = import_module(module)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        sound = getattr(owner, last)
        changed = change(sound)
        for place in [owner] if outer else _places(last, sound):
            patch.setattr(place, last, changed)

    OTHERS.append(Planted(name, text, files, plant))


def _places(name: str, sound: Any) -> Iterator[Any]:
    """Yields the modules that have a function under its name."""
    yield from [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is sound]


_fault(
    "T1", "norms and biases decay like matrices", TRAINING,
    "mamba_jax.train.optimizer:_decayed", lambda sound: lambda values: dict.fromkeys(values, True),
)  # fmt: skip
_fault(
    "T2", "documents that are held out for validation are trained on", TRAINING,
    "mamba_jax.train.data:hold_out", lambda sound: lambda streams, share: (dict(streams), sound(streams, share)[1]),
)  # fmt: skip
_fault(
    "C1", "the two 4-bit numbers of a byte change places", CHECKPOINTS,
    "checkpoints.quantized.packing:unpack_fp4", lambda sound: lambda packed: sound(packed << 4 | packed >> 4),
)  # fmt: skip
_fault(
    "C2", "columns of AWQ are taken in the order of their bits", CHECKPOINTS,
    "checkpoints.quantized.packing:unpack_awq",
    lambda sound: lambda words: import_module("checkpoints.quantized.packing").unpack(words, 4, -1),
)  # fmt: skip
_fault(
    "C3", "numbers of an adapter that overflow in the model's dtype reach the device", ADAPTERS,
    "mamba_jax.adapters:_cast", lambda sound: lambda path, value, dtype: value.astype(dtype),
)  # fmt: skip
_fault(
    "C4", "an adapter's digest does not depend on its scale", ADAPTERS,
    "checkpoints.adapters.adapter:digest_of",
    lambda sound: lambda layers: sound({path: _unscaled(arrays) for path, arrays in layers.items()}),
)  # fmt: skip
_fault(
    "H1", "every key is accepted", HTTP,
    "serving.api.http.connection.keys:is_one_of", lambda sound: lambda key, keys: True,
)  # fmt: skip
_fault(
    "H2", "half of a surrogate pair reaches the tokenizer", HTTP,
    "serving.api.http.limits:_refuse_half_characters", lambda sound: lambda body: None,
)  # fmt: skip
_fault(
    "K1", "attention to a window sees everything before it", KERNELS,
    "kernels_pallas.paged_attention.xla:_is_seen",
    lambda sound: lambda key, position, *, first_key=0, window=None: sound(key, position, first_key=first_key),
)  # fmt: skip
_fault(
    "K2", "experts are chosen from all groups, not from the best", KERNELS,
    "kernels_pallas.expert_choice.xla:_in_best_groups", lambda sound: lambda scores, rule: scores,
)  # fmt: skip


def _unscaled(arrays: Any) -> Any:
    return arrays | {"B": arrays["B"] / abs(arrays["B"]).max(initial=1e-30)} if "B" in arrays else arrays


def _ids_of_the_first_row(sound: Any) -> Any:
    def prompt_logprobs(logits: Any, rows: Any, batch: Any, *rest: Any) -> Any:
        ids = rows.sampling.prompt_logprob_ids
        table = replace(rows.sampling, prompt_logprob_ids=ids.at[:].set(ids[batch.row_id[0]]))
        return sound(logits, replace(rows, sampling=table), batch, *rest)

    return prompt_logprobs


def _adapters_of_other_rows(sound: Any) -> Any:
    def changed(parts: Any, *rest: Any) -> Any:
        *heads, rows = rest
        sole = len(parts) == 1 or rows.adapter is None
        return sound(parts, *heads, rows if sole else replace(rows, adapter=rows.adapter[::-1]))

    return changed


_fault(
    "M1", "the upper half of a seed does not count", MODELS,
    "mamba_jax.sampling.table:_key", lambda sound: lambda seed, choice: sound(seed & 0xFFFFFFFF, choice),
)  # fmt: skip
_fault(
    "M2", "all rows of a prefill report the ids of prompt_logprob_token_ids of the first", MODELS,
    "mamba_jax.step.prefill:prompt_logprobs", _ids_of_the_first_row,
)  # fmt: skip
_fault(
    "M3", "rows of a mixed step have the adapters of other rows", MODELS,
    "mamba_jax.step.run:_layout", _adapters_of_other_rows,
)  # fmt: skip
_fault(
    "M4", "logits of a mixed step are of the heads of other rows' adapters", MODELS,
    "mamba_jax.step.run:_head_adapters", _adapters_of_other_rows,
)  # fmt: skip
