"""Every planted fault by its name in docs/mutations.md, with the files of the default tier that should detect it."""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from tests.serving.core.mutations.registry import Fault, Patch


@dataclass(frozen=True)
class Planted(Fault):
    """A fault of any part of the project."""

    files: tuple[str, ...] = ()
    """Test files and folders, the likeliest first."""


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


def faults_like(name: str = "") -> dict[str, Planted]:
    """The faults of the kind that the name begins with, by name; all without a name. Imports what they change."""
    kind = name.rstrip("0123456789")
    chosen = ("", "D", "S") if not name else (kind,) if kind in ("", "D", "S") else ()
    tables = [
        Planted(fault.name, fault.plant, files=files) for files, faults in map(_table, chosen) for fault in faults
    ]
    others = [Planted(name, _replacing(where, change), files=files) for name, files, where, change in OTHERS]
    return {fault.name: fault for fault in [*tables, *others]}


def _table(kind: str) -> tuple[tuple[str, ...], Collection[Fault]]:
    """The faults of the host policy, the device or the split, and the files that should detect them."""
    match kind:
        case "D":
            from tests.serving.differential import draft_faults, faults  # noqa: F401

            return DEVICE, faults.planted().values()
        case "S":
            from tests.serving.split.test_split_mutations import FAULTS

            return SPLIT, FAULTS.values()
    from tests.serving.core.mutations import CORE as policy

    return CORE, policy.values()


def _replacing(where: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Makes a plant of `change(original)` in the place of "module:function" or "module:class.method"."""

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

    return plant


def _places(name: str, sound: Any) -> Iterator[Any]:
    """Yields the modules that have a function under its name."""
    yield from [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is sound]


def _unscaled(arrays: Any) -> Any:
    return arrays | {"B": arrays["B"] / abs(arrays["B"]).max(initial=1e-30)} if "B" in arrays else arrays


def _ids_of_the_first_row(sound: Any) -> Any:
    def prompt_logprobs(logits: Any, rows: Any, batch: Any, *rest: Any) -> Any:
        ids = rows.sampling.prompt_logprob_ids
        table = replace(rows.sampling, prompt_logprob_ids=ids.at[:].set(ids[batch.row_id[0]]))
        return sound(logits, replace(rows, sampling=table), batch, *rest)

    return prompt_logprobs


def _adapters_of_other_rows(sound: Any) -> Any:
    def turned(value: Any) -> Any:
        return replace(value, adapter=value.adapter[::-1]) if getattr(value, "adapter", None) is not None else value

    return lambda parts, *rest: sound(parts, *(rest if len(parts) == 1 else map(turned, rest)))


OTHERS: tuple[tuple[str, tuple[str, ...], str, Callable[[Any], Any]], ...] = (
    ("T1", TRAINING, "mamba_jax.train.optimizer:_decayed", lambda sound: lambda values: dict.fromkeys(values, True)),
    ("T2", TRAINING, "mamba_jax.train.data:hold_out",
     lambda sound: lambda streams, share: (dict(streams), sound(streams, share)[1])),
    ("C1", CHECKPOINTS, "checkpoints.quantized.packing:unpack_fp4",
     lambda sound: lambda packed: sound(packed << 4 | packed >> 4)),
    ("C2", CHECKPOINTS, "checkpoints.quantized.packing:unpack_awq",
     lambda sound: lambda words: import_module("checkpoints.quantized.packing").unpack(words, 4, -1)),
    ("C3", ADAPTERS, "mamba_jax.adapters:_cast", lambda sound: lambda path, value, dtype: value.astype(dtype)),
    ("C4", ADAPTERS, "checkpoints.adapters.adapter:digest_of",
     lambda sound: lambda layers: sound({path: _unscaled(arrays) for path, arrays in layers.items()})),
    ("H1", HTTP, "serving.api.http.connection.keys:is_one_of", lambda sound: lambda key, keys: True),
    ("H2", HTTP, "serving.api.http.limits:_refuse_half_characters", lambda sound: lambda body: None),
    ("K1", KERNELS, "kernels_pallas.paged_attention.xla:_is_seen",
     lambda sound: lambda key, position, *, first_key=0, window=None: sound(key, position, first_key=first_key)),
    ("K2", KERNELS, "kernels_pallas.expert_choice.xla:_in_best_groups", lambda sound: lambda scores, rule: scores),
    ("M1", MODELS, "mamba_jax.sampling.table:_key",
     lambda sound: lambda seed, choice: sound(seed & 0xFFFFFFFF, choice)),
    ("M2", ("tests/serving/engine/test_requests.py",), "mamba_jax.step.prefill:prompt_logprobs", _ids_of_the_first_row),
    ("M3", MODELS, "mamba_jax.step.run:_layout", _adapters_of_other_rows),
    ("M4", MODELS, "mamba_jax.step.run:_head_adapters", _adapters_of_other_rows),
)  # fmt: skip
"""Those that are not in the tables of the host policy, the device and the split: name, files, what is replaced, and by
what."""
