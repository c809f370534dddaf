"""Public repositories of recurrent models: each is read, or refused with its reason, by its small files alone.

And published sizes: their config.json is read and built without weights.

`published_repositories.jsonl` has one a line: its name; its config.json, by the name of a preset or of a line of
`published_configs.jsonl`, or the fields that name its family; the form of its quantized weights, if any; and the reason
in the error, if it is refused. Its tensors are names, shapes and dtypes, as this family and this form have them: no
file of the hub is read, and no weights exist.

`published_configs.jsonl` has configs that are no presets: the fields that their makers' tools and other engines quote.
`billions` is the published number of the text model's parameters. Models of missing families may have only the fields
that name the family.
"""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import save_file

from checkpoints import load_config
from checkpoints.load import Checkpoint
from checkpoints.placing import abstract_parameters
from checkpoints.presets import PRESETS
from checkpoints.quantized.tensors import LogicalTensors
from checkpoints.tensors.hugging_face import match_sources
from mamba_jax.families import FAMILIES, UNSUPPORTED, ignored, weight_names
from mamba_jax.model import HybridModel, num_parameters
from mamba_jax.store import StoreShape
from tests.checkpoints.checks import message

REPOSITORIES, PUBLISHED = (
    [json.loads(line) for line in (Path(__file__).parent / f"published_{name}.jsonl").read_text().splitlines()]
    for name in ("repositories", "configs")
)
# Repositories of one config and one form differ by name only: the first stands for all.
CASES = list({json.dumps(row | {"repository": None}): row for row in reversed(REPOSITORIES)}.values())[::-1]
BILLIONS = {row["model"]: row.get("billions") for row in PUBLISHED}
CONFIGS = {row["model"]: row["config"] for row in PUBLISHED} | {name: one.fields for name, one in PRESETS.items()}
DENSE = r".*\.(in_proj(_qkvz|_qkv|_z)?|out_proj|[qkvox]_proj|(up|down|gate)_proj|(in|out)put_linear)"


def fp8(shape, scale="weight_scale", per=(), dtype="F32"):
    return {"weight": ("F8_E4M3", shape), scale: (dtype, per)}


def fp8_blocks(shape):
    return fp8(shape, "weight_scale_inv", (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)))


def nvfp4(shape):
    *lead, inputs = shape
    parts = {"weight": ("U8", (*lead, inputs // 2)), "weight_scale": ("F8_E4M3", (*lead, inputs // 16))}
    return parts | {"weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}


def packed(shape):
    words, scales = ("I32", (shape[0], shape[1] // 8)), ("BF16", (shape[0], shape[1] // 32))
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": ("I64", (2,), shape)}


def gptq(shape):
    outputs, inputs = shape
    zeros, scales = ("I32", (inputs // 32, outputs // 8)), ("F16", (inputs // 32, outputs))
    return {"qweight": ("I32", (inputs // 8, outputs)), "qzeros": zeros, "scales": scales}


def nf4(shape):
    count = math.prod(shape)
    text = json.dumps({"blocksize": 64, "shape": shape, "nested_blocksize": 256, "nested_offset": 0.1}).encode()
    sizes = {"absmax": count // 64, "quant_map": 16, "nested_absmax": -(-count // 64 // 256), "nested_quant_map": 256}
    parts = {f"weight.{name}": ("U8" if name == "absmax" else "F32", (size,)) for name, size in sizes.items()}
    state = {"weight.quant_state.bitsandbytes__nf4": ("U8", (len(text),), text)}
    return {"weight": ("U8", (count // 2, 1)), **parts, **state}


MODELOPT, COMPRESSED = {"quant_method": "modelopt"}, {"quant_method": "compressed-tensors"}
FORMS = {
    "FP8": (MODELOPT | {"quant_algo": "FP8"}, {DENSE: fp8}),
    "NVFP4": (MODELOPT | {"quant_algo": "NVFP4"}, {DENSE: nvfp4}),
    "NVFP4 experts, FP8": (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, {r".*\.experts\..*": nvfp4, DENSE: fp8}),
    "NVFP4 MLPs, FP8": (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, {r".*\.mlp\..*_proj": nvfp4, DENSE: fp8}),
    "NVFP4 with the head": (MODELOPT | {"quant_algo": "NVFP4"}, {rf"lm_head|{DENSE}": nvfp4}),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {DENSE: fp8_blocks}),
    "FP8 channels": (COMPRESSED, {DENSE: lambda shape: fp8(shape, per=(*shape[:-1], 1), dtype="BF16")}),
    "packed INT4": (COMPRESSED, {DENSE: packed}),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {DENSE: gptq}),
    "AutoRound": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, {DENSE: gptq}),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {DENSE: nf4}),
    "MLX": ({"group_size": 64, "bits": 4}, {}),
}


class Listed:
    """Tensors without numbers, but for those that say how others are to be read."""

    def __init__(self, shapes, formats):
        self.listed = {}
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            form = next((form for pattern, form in formats.items() if re.fullmatch(pattern, module)), None)
            if form is None or shape[-1] % 32:
                self.listed[name] = "BF16", shape
            else:
                self.listed |= {f"{module}.{suffix}": part for suffix, part in form(shape).items()}
        self.names = set(self.listed)

    def dtype(self, name):
        return self.listed[name][0]

    def shape(self, name):
        return tuple(self.listed[name][1])

    def view(self, name):
        content = self.listed[name][2]
        return memoryview(content) if isinstance(content, bytes) else content


@functools.cache
def described(config):
    """The model's parameters without weights, their sources, and the tensors of a checkpoint that is not quantized."""
    shapes, sources, stored = abstract_parameters(config, jnp.float32), weight_names(config), {}
    for path, source in sources.items():
        stored |= source.shapes(shapes[path].shape)
    return shapes, sources, stored


@pytest.mark.smoke("form")
@pytest.mark.parametrize(
    ("row", "form"), [(row, row.get("form")) for row in CASES], ids=[row["repository"] for row in CASES]
)
def test_every_repository_is_read_or_refused_by_name(tmp_path, row, form):
    description, formats = FORMS[form] if form else (None, {})
    fields = CONFIGS[row["config"]] if isinstance(row["config"], str) else row["config"]
    if form:  # each expert has tensors of its own
        few = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok"), 8)
        fields = json.loads(json.dumps(fields), object_hook=lambda one: one | {n: few[n] for n in few if one.get(n)})
    (tmp_path / row.get("file", "config.json")).write_text(json.dumps(fields | {"quantization_config": description}))
    checkpoint = Checkpoint(tmp_path)
    if reason := row.get("refused"):
        save_file({}, tmp_path / "model.safetensors")
        assert reason in message(checkpoint.load, progress=False, sharding=None)
        return
    config = checkpoint.config
    shapes, sources, stored = described(config)
    tensors = LogicalTensors(row["repository"], Listed(stored, formats), checkpoint._quantization)
    assert bool(tensors.quantized) == bool(form)
    assert match_sources(row["repository"], tensors, shapes, sources, ignored(config)).keys() == shapes.keys()
    if row["repository"] in BILLIONS:
        text = fields.get("text_config") or fields.get("llm_config") or fields
        assert (config.hidden_size, config.vocab_size) == (text["hidden_size"], text["vocab_size"])
        assert num_parameters(shapes) > config.hidden_size * config.vocab_size
    if billions := BILLIONS.get(row["repository"]):
        assert num_parameters(shapes) == pytest.approx(billions * 1e9, rel=0.01)


def test_the_table_has_each_repository_and_each_config_once():
    assert len({row["repository"] for row in REPOSITORIES}) == len(REPOSITORIES) >= 60
    assert set(BILLIONS) <= {str(row["config"]) for row in REPOSITORIES}
    assert not set(UNSUPPORTED) & {one for family in FAMILIES for one in family.model_types}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    shapes, sources, _ = described(load_config(name))
    counted = sum(math.prod(leaf.shape) for path, leaf in shapes.items() if not path.startswith("mtp."))
    assert counted == pytest.approx(PRESETS[name].parameters, rel=0.01)
    assert sources.keys() == shapes.keys()


@pytest.mark.parametrize(
    ("name", "layers", "slot_mib", "kv_kib"),
    [
        ("nemotron-h-8b", (24, 4, 24), None, None),
        ("nemotron-h-56b", (54, 10, 54), None, None),
        ("nemotron-nano-9b-v2", (27, 4, 25), None, None),
        ("nemotron-3-nano-30b-a3b", (23, 6, 23), None, None),
        ("nemotron-3-super-120b-a12b", (40, 8, 40), None, None),
        ("bamba-9b", (29, 3, 32), None, None),
        ("granite-4.0-h-small", (36, 4, 40), None, None),
        ("falcon-h1-34b", (72, 72, 72), None, None),
        ("zamba2-7b", (81, 13, 0), None, None),
        # As users report.
        ("qwen3-next-80b-a3b", (36, 12, 48), 73.7, 24),
        ("qwen3.5-9b", (24, 8, 32), 49.1, 32),
        ("qwen3.5-27b", (48, 16, 64), 146.8, 64),
        ("qwen3.5-35b-a3b", (30, 10, 40), 61.4, 20),
        # Not reported: 20 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("kimi-linear-48b-a3b", (20, 7, 27), 41.4, 7.875),
        # 35 states of 2 MiB with their windows, and 7 latents of 576 numbers.
        ("ling-3.0-flash", (35, 7, 42), 72.46, 7.875),
        # 70 states of 4 MiB, and 8 keys and values of 128 numbers in 10 layers.
        ("minimax-text-01", (70, 10, 80), 280, 40),
        # 64 states of 512 KiB with windows of 48 KiB.
        ("falcon-mamba-7b", (64, 0, 0), 35, 0),
        # 28 such states, and 8 keys and values of 128 numbers in 4 layers.
        ("jamba-1.5-mini", (28, 4, 32), 15.3, 16),
        ("jamba-1.5-large", (63, 9, 72), None, None),
        # 18 states of 10 KiB with windows of 15 KiB, and one key and value of 256 numbers in 8 layers.
        ("recurrentgemma-2b", (18, 8, 26), 0.44, 8),
    ],
)
def test_layers_and_states_are_as_published(name, layers, slot_mib, kv_kib):
    config = load_config(name)
    mlp_or_moe = sum(config.pattern.count(kind) for kind in "-E")
    assert (config.num_recurrent_layers, config.num_attention_uses, mlp_or_moe) == layers
    if slot_mib is not None:
        # States in float32, windows and keys and values in bfloat16, without the draft layer.
        shape = StoreShape.of(dataclasses.replace(config, mtp_pattern=""))
        assert shape.bytes_per_slot(jnp.bfloat16) / 2**20 == pytest.approx(slot_mib, abs=0.1)
        assert shape.bytes_per_page(1, jnp.bfloat16) == kv_kib * 1024


def test_the_draft_layer_of_nemotron_3_super_is_kept():
    config = load_config("nemotron-3-super-120b-a12b")
    assert config.mtp_pattern == "*E"
    assert HybridModel.abstract(config).mtp is not None
