"""Drafters are read from directories as published, in both of the forms that EAGLE-3 has."""

import json
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.drafts import load_drafter_config, with_drafter
from checkpoints.load import Checkpoint, load_config
from mamba_jax.families.drafters import layer_places
from tests.checkpoints.checks import message, values
from tests.support.engines.engine_harness import GOLDEN
from tests.support.models.drafters import write_block, write_eagle

TARGET = load_config(GOLDEN)


def test_both_published_forms_are_read_alike(tmp_path):
    loaded, read = Checkpoint(GOLDEN, dtype="float32").load_identified(progress=False), []
    for form in ("eagle", "speculators"):
        folder = write_eagle(tmp_path / form, TARGET, form=form)
        model = with_drafter(folder, loaded, progress=False).model
        read.append(values(model))
    assert read[0].keys() == read[1].keys()
    for path, value in read[0].items():
        np.testing.assert_array_equal(value, read[1][path])
    assert read[0]["drafter.tokens"].tolist() == list(range(0, 2 * len(read[0]["drafter.tokens"]), 2))
    assert not any(path.startswith("mtp.") for path in read[0])


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_drafters_of_blocks_are_read(tmp_path, method):
    folder = write_block(tmp_path / method, TARGET, method=method)
    model = with_drafter(folder, Checkpoint(GOLDEN, dtype="float32").load_identified(progress=False)).model
    drafter, stored = model.config.drafter, load_file(folder / "model.safetensors")
    assert drafter.method == method.rstrip("2")
    # The outputs of layers 0 and 2, each of one sublayer here.
    assert drafter.places == (1, 3)
    assert drafter.mask_token == TARGET.vocab_size - 1
    assert drafter.from_newest == (method == "dspark")
    found = values(model)
    pairs = {"states_norm": "hidden_norm", "layers.1.attention.k_norm": "layers.1.self_attn.k_norm"}
    if method == "dspark":
        pairs |= {"markov_before": "markov_head.markov_w1", "markov_after": "markov_head.markov_w2"}
        pairs |= {"confidence": "confidence_head.proj"}
    if method == "dflash2":
        stored["after.weight"] = stored["candidate_selector.successor_codebook"]
        pairs |= {"selector.after": "after", "layers.1.mlp_conv.projection": "layers.1.mlp_conv.kernel_projection"}
        assert (drafter.attention.window, drafter.conv_group, drafter.selector_top) == (16, 4, 6)
    for ours, theirs in pairs.items():
        np.testing.assert_array_equal(found[f"drafter.{ours}.weight"], stored[f"{theirs}.weight"])


BLOCKS, EAGLE = partial(write_block, method="dflash"), write_eagle


@pytest.mark.parametrize(
    ("write", "change", "said"),
    [
        (BLOCKS, {"dflash_config": {"mask_token_id": 3}}, "reads hidden states at [] (target_layer_ids)"),
        (BLOCKS, {"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is -1"),
        (BLOCKS, {"layer_types": ["sliding_attention"]}, "layer_types has ['sliding_attention']"),
        (BLOCKS, {"selector_rank": 4}, "selector_top_k is 0: expected 1 to"),
        (BLOCKS, {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is True"),
        (BLOCKS, {"conv_kernel_size": 4, "conv_group_size": 7}, "channels cannot be divided into groups of 7"),
        (BLOCKS, {"architectures": ["Qwen3DSparkModel"]}, "markov_rank is missing"),
        (EAGLE, {"hidden_size": 48}, "the drafter is for a model with hidden size 48, but this model has"),
        (EAGLE, {"vocab_size": 77}, "the drafter is for a model with vocabulary 77, but this model has"),
        (EAGLE, {"architectures": ["LlamaForCausalLM"]}, "that is supported; known are eagle3, dflash, dspark"),
        (EAGLE, {"eagle_aux_hidden_state_layer_ids": [1, 99]}, "expected 0 to"),
        (EAGLE, {"draft_vocab_size": 100_000}, "draft_vocab_size is 100000: at most vocab_size"),
        (EAGLE, {"kv_lora_rank": 4}, "kv_lora_rank"),
        (EAGLE, lambda tensors: tensors.pop("fc.weight"), "1 missing: fc.weight"),
        (EAGLE, lambda tensors: tensors.pop("d2t"), "1 missing: d2t"),
        (EAGLE, lambda tensors: tensors.pop("lm_head.weight"), "the drafter has no lm_head.weight"),
        (EAGLE, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1]}), "1 of the wrong shape"),
        (EAGLE, lambda tensors: tensors.update({"midlayer.extra": tensors["d2t"]}), "1 unexpected: midlayer.extra"),
        (EAGLE, lambda tensors: tensors.update({"d2t": tensors["d2t"] + 1000}), "d2t maps draft tokens to"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, write, change, said):
    """In one line: fields of config.json, or tensors that a function changes."""
    folder = write(tmp_path / "drafter", TARGET)
    config, weights = folder / "config.json", folder / "model.safetensors"
    read = partial(load_drafter_config, folder, TARGET)
    if callable(change):
        tensors = load_file(weights)
        change(tensors)
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, weights)
        read = partial(with_drafter, folder, Checkpoint(GOLDEN, dtype="float32").load_identified(progress=False))
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert said in message(read)


def test_the_digest_is_of_both_models(tmp_path):
    loaded = Checkpoint(GOLDEN, dtype="float32").load_identified(progress=False)
    found = {loaded.digest}
    for seed in (0, 1):
        found.add(with_drafter(write_eagle(tmp_path / str(seed), TARGET, seed=seed), loaded).digest)
    assert len(found) == 3


def test_layers_of_one_sublayer_and_of_two():
    assert layer_places(TARGET) == tuple(range(len(TARGET.pattern) + 1))
    falcon = load_config(GOLDEN.parent / "falconh1")
    assert layer_places(falcon) == tuple(range(0, len(falcon.pattern) + 1, 2))


def test_a_drafter_of_another_kind_or_none(tmp_path):
    path = write_eagle(tmp_path / "drafter", TARGET)
    assert "is a drafter of the kind eagle3, not dflash" in message(load_drafter_config, path, TARGET, method="dflash")
    assert "no config.json" in message(load_drafter_config, tmp_path / "nothing", TARGET)
