"""Adapters are written under the names that transformers and PEFT have for the modules, and read back as they were."""

import math

import numpy as np
import pytest

from checkpoints.adapters.adapter import MODULE_PREFIX, read_adapter
from checkpoints.adapters.adapter_export import target_layers, write_adapter
from checkpoints.load import load_config
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.adapters import adaptable_layers
from mamba_jax.model import HybridModel
from tests.support.models.golden_case import FIXTURES

# Shared blocks are refused.
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/adapter") if path.parent.name != "zamba2")


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_and_shapes_that_peft_gives_them_and_are_read_back(name, tmp_path):
    config = load_config(str(FIXTURES / name))
    layers, rng = adaptable_layers(HybridModel.abstract(config)), np.random.default_rng(0)
    modules = {}
    for path, module in target_layers(config).items():
        *outputs, inputs = layers[path].weight.shape
        a, parts = modules.setdefault(module, (rng.normal(size=(3, inputs)).astype(np.float32), {}))
        parts[path] = rng.normal(size=(math.prod(outputs), len(a))).astype(np.float32)
    write_adapter(tmp_path, modules, config, alpha=3.0)

    by_peft = SafetensorsFile(FIXTURES / name / "adapter" / "adapter_model.safetensors").entries
    written = SafetensorsFile(tmp_path / "adapter_model.safetensors").entries
    assert all(tensor.startswith(MODULE_PREFIX) for tensor in written)
    # PEFT takes the names of this fixture's MLPs for those of experts: its adapter has none.
    assert name == "qwen3next-dense" or written.keys() == by_peft.keys()
    rows = {tensor: entry.shape[0] for tensor, entry in by_peft.items() if "lora_B" in tensor}
    assert {tensor: written[tensor].shape[0] for tensor in rows} == rows

    read = read_adapter(tmp_path, config)
    assert read.layers.keys() == layers.keys()
    for a, parts in modules.values():
        for path, b in parts.items():
            np.testing.assert_array_equal(read.layers[path][0], a, err_msg=path)
            np.testing.assert_allclose(read.layers[path][1], b, rtol=1e-6, err_msg=path)
