"""Quantized checkpoints against Hugging Face in this very process: it runs the wide weights that they stand for.

Hugging Face's own random models are saved by it; each format's published definition (tests/support) makes of the saved
tensors narrow ones for us, and the wide ones that these stand for for them. Needs the `parity` extra.
"""

import dataclasses
import functools
import json
import re
import shutil

import numpy as np
import pytest
from golden.recipes import RECIPES
from safetensors.numpy import load_file, save_file

from checkpoints import load_model
from checkpoints.tensors.tensor_set import TensorSet
from tests.support.models.golden_case import TO_HUGGING_FACE, draft_log_probs, full_log_probs
from tests.support.models.quantized_checkpoints import CONFIGS, METHODS, MIXED_FORMATS, mixed_description

pytestmark = pytest.mark.parity

MODELS = ("moe", "granite", "falcon", "latent")
FORMATS = METHODS | {"mixed": None}
"""Each on one model by default, and on all with --slow."""
CASES = [
    pytest.param(model, method, marks=() if number % len(MODELS) == place else pytest.mark.slow)
    for number, method in enumerate(FORMATS)
    for place, model in enumerate(MODELS)
]
WITH_DRAFTS = ("moe", "latent")
DRAFT_CASES = [
    pytest.param(model, method, marks=() if number % 8 == 2 * place else pytest.mark.slow)
    for number, method in enumerate(METHODS)
    for place, model in enumerate(WITH_DRAFTS)
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of Hugging Face's by name: its class, and the directory that it was saved to."""
    pytest.importorskip("torch", reason="torch is not installed: needs the parity extra")
    pytest.importorskip("transformers", reason="transformers is not installed: needs the parity extra")
    from golden import make_goldens, oracle

    @functools.cache
    def make(name):
        golden, changes = CONFIGS[name]
        recipe = dataclasses.replace(RECIPES[golden], config=RECIPES[golden].config | changes, seed=5)
        theirs = oracle.build(recipe)
        directory = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(directory)
        if name in WITH_DRAFTS:
            tensors = load_file(directory / "model.safetensors")
            drafts = make_goldens.mtp_weights(recipe, tensors)
            tensors |= {name: drafts[name].numpy() for name in drafts}
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return type(theirs), directory

    return make


def quantized(directory, target, formats, description):
    """Both directories, narrow and what it stands for, and the modules that are narrow."""
    tensors = TensorSet(directory)
    narrow, wide, modules = {}, {}, []
    for name in sorted(tensors.names):
        module, value = name.removesuffix(".weight"), np.asarray(tensors.view(name), np.float32)
        kind = next((one for pattern, one in formats.items() if re.fullmatch(pattern, module)), None)
        narrow[name] = wide[name] = value
        if kind is not None and name.endswith(".weight") and value.ndim == 2:
            parts, wide[name] = kind(value)
            del narrow[name]
            narrow |= {f"{module}.{suffix}": np.ascontiguousarray(part) for suffix, part in parts.items()}
            modules.append(module)
    for folder, content, more in (("narrow", narrow, {"quantization_config": description}), ("wide", wide, {})):
        shutil.copytree(directory, target / folder)
        for file in (target / folder).glob("*.safetensors*"):
            file.unlink()
        save_file({k: np.ascontiguousarray(v) for k, v in content.items()}, target / folder / "model.safetensors")
        config = target / folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | more))
    return target / "narrow", target / "wide", modules


def narrow_and_wide(kind, directory, method, target):
    """Our model from the narrow checkpoint, theirs from the wide one, and where the latter lies."""
    import torch

    if method == "mixed":
        formats = {pattern.replace("backbone", "(model|backbone)"): one for pattern, one in MIXED_FORMATS.items()}
        description = mixed_description(set())
    else:
        description, formats = METHODS[method]
    narrow, wide, modules = quantized(directory, target, formats, description)
    assert modules
    if method != "mixed" and directory.name.startswith(WITH_DRAFTS):
        assert any(module.startswith("mtp.") for module in modules)
    if method != "mixed" and directory.name.startswith("latent"):
        assert any("latent_proj" in module for module in modules)
    theirs = kind.from_pretrained(wide, dtype=torch.float32, attn_implementation="eager").eval()
    return load_model(narrow, dtype="float32", progress=False), theirs, wide


@pytest.mark.parametrize(("model", "method"), CASES)
def test_agrees_with_hugging_face(model, method, saved, tmp_path):
    from golden import oracle

    ours, theirs, _ = narrow_and_wide(*saved(model), method, tmp_path)
    generator = np.random.default_rng(3)
    prompts = [generator.integers(0, ours.config.vocab_size, length) for length in (1, 7, 90)]
    for prompt, got in zip(prompts, full_log_probs(ours, prompts), strict=True):
        assert np.abs(got - oracle.log_probs(theirs, prompt.tolist()).numpy()).max() <= TO_HUGGING_FACE


@pytest.mark.parametrize(("model", "method"), DRAFT_CASES)
def test_draft_layers_agree(model, method, saved, tmp_path):
    from golden.nemotron_drafts import DraftLayer

    ours, theirs, wide = narrow_and_wide(*saved(model), method, tmp_path)
    tokens = np.random.default_rng(4).integers(0, ours.config.vocab_size, 50)
    expected = DraftLayer(theirs, wide, tmp_path / "longer").log_probs(tokens.tolist()).numpy()
    assert np.abs(draft_log_probs(ours, tokens) - expected).max() <= TO_HUGGING_FACE
