"""Models by reference: Hugging Face directories, the demo, dummy weights; and what is said when something is wrong."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints.presets import PRESETS
from checkpoints.random import tensor_shapes, write_random
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.families import as_stored, config_from_hf
from mamba_jax.model import parameters
from tests.checkpoints.checks import assert_equal, load, message, values
from tests.support.models.golden_case import FIXTURES, NAMES
from tests.support.models.tiny_configs import CHECKPOINT


@pytest.fixture
def directory(tmp_path):
    return write_random(tmp_path / "tiny", CHECKPOINT)


def change_config(directory, **changes):
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != "absent"}))


# --- what is read


# The golden has the names of transformers' modules, which is neither what transformers saves nor what is published.
# Lara's has a layer's experts in one tensor. Both forms are read; random checkpoints have a tensor for each expert.
SAVED_OTHERWISE = ("olmo-hybrid", "lara-mini")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SAVED_OTHERWISE])
def test_random_checkpoints_have_the_names_that_hugging_face_writes(name):
    golden = FIXTURES / name
    tensors = TensorSet(golden)
    config = as_stored(config_from_hf(checkpoints.json_file.read_json(golden / "config.json")), tensors.names)
    stored = {name: tensors.shape(name) for name in tensors.names}
    if any(name.startswith("model.") for name in stored) and config.family in ("NemotronH", "Mamba2"):
        stored = {name.replace("model.", "backbone.", 1): shape for name, shape in stored.items()}
    if config.family == "Qwen3.5":
        # As published: a text model with a vision tower, which is left out.
        stored = {name: shape for name, shape in stored.items() if not name.startswith("model.visual.")}
        apart = ("model.language_model.", "lm_head.", "mtp.")
        stored = {
            name if name.startswith(apart) else name.replace("model.", "model.language_model.", 1): shape
            for name, shape in stored.items()
        }
    if config.family == "MiniMax":
        # transformers also saves what it computes from the decay rates.
        decays = (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")
        stored = {name: shape for name, shape in stored.items() if not name.endswith(decays)}
    if config.family == "KimiLinear":
        # transformers saves MLPs under the name that Moonshot gives mixtures of experts only.
        stored = {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name): shape for name, shape in stored.items()}
    assert tensor_shapes(config) == stored


def test_a_convolution_cut_in_equal_thirds(tmp_path):
    """transformers 5.23 saves OLMo Hybrid's conv1d by `torch.chunk(..., 3)`: here 40 and 40 key rows per head and 24
    value rows are cut without regard to what they are. Only their sum is checked."""
    golden = FIXTURES / SAVED_OTHERWISE[0]
    expected, saved = values(load(golden)), TensorSet(golden)
    tensors = {}
    for name in saved.names:
        value = saved.view(name)
        if name.endswith("conv1d.weight"):
            size = -(-len(value) // 3)  # of torch's chunks; the last may be smaller
            for part, start in zip("qkv", range(0, len(value), size), strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = value[start : start + size]
        else:
            renamed = name.replace(".input_layernorm.", ".attention_layer_norm.")
            tensors[renamed.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")] = value
    target = tmp_path / "saved"
    target.mkdir()
    shutil.copy(golden / "config.json", target)
    save_file(tensors, target / "model.safetensors")
    assert_equal(values(load(target)), expected)
    name = next(name for name in tensors if name.endswith(".q_conv1d.weight"))
    save_file({**tensors, name: tensors[name][1:]}, target / "model.safetensors")
    with pytest.raises(checkpoints.CheckpointError, match=r"q_conv1d\.weight is .* expected"):
        load(target)


def test_draft_layer_is_kept_when_stored_and_dropped_when_not(directory):
    assert load(directory).mtp is not None
    stored = load_file(directory / "model.safetensors")
    others = {name: value for name, value in stored.items() if not name.startswith("mtp.")}
    save_file(others, directory / "model.safetensors")
    model = load(directory)
    assert model.mtp is None
    assert model.config.mtp_pattern == ""
    # One tensor of it is enough to say that the others are missing; what is none of its tensors is not ignored.
    one = "mtp.layers.0.enorm.weight"
    save_file(others | {one: stored[one], "mtp.extra": stored[one]}, directory / "model.safetensors")
    text = message(load, directory)
    assert "missing: mtp.layers.0." in text
    assert "1 unexpected: mtp.extra" in text


@pytest.mark.parametrize("name", ["embeddings", "embed_tokens"])
def test_a_draft_layer_with_tables_of_its_own(directory, name):
    stored = load_file(directory / "model.safetensors")
    embed, head = (stored["lm_head.weight"] * factor for factor in (2, 3))
    save_file(stored | {f"mtp.{name}.weight": embed, "mtp.lm_head.weight": head}, directory / "model.safetensors")
    model = load(directory)
    np.testing.assert_array_equal(model.mtp.embed.weight[...], embed)
    np.testing.assert_array_equal(model.draft_head.weight[...], head)
    np.testing.assert_array_equal(model.head.weight[...], stored["lm_head.weight"])


def test_draft_layers_that_cannot_be_used_are_ignored(directory):
    for layers in (0, 2):
        change_config(directory, num_nextn_predict_layers=layers)
        assert load(directory).mtp is None


# --- dtypes


def test_auto_is_float32_on_cpu_and_the_checkpoints_dtype_on_accelerators(tmp_path, monkeypatch):
    write_random(tmp_path, CHECKPOINT, dtype="bfloat16")
    assert {leaf.dtype for leaf in parameters(load(tmp_path)).values()} == {np.dtype(np.float32)}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert parameters(load(tmp_path))["embed.weight"].dtype == ml_dtypes.bfloat16
    change_config(tmp_path, dtype="absent", torch_dtype="float16")
    assert parameters(load(tmp_path))["embed.weight"].dtype == np.float16


@pytest.mark.parametrize(("option", "value"), [("dtype", "fp8"), ("dtype", "int8"), ("load_format", "pt")])
def test_impossible_options(directory, option, value):
    known = "auto, float32, bfloat16, float16" if option == "dtype" else "'auto' and 'dummy'"
    said = f"{option.replace('_', ' ')} {value!r} is not supported; allowed are {known}"
    assert message(load, directory, **{option: value}) == said


# --- dummy weights and the demo


def test_dummy_weights_need_a_config_only(directory):
    (directory / "model.safetensors").unlink()
    one, two, other = (load(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert_equal(values(one), values(two))
    assert (values(one)["embed.weight"] != values(other)["embed.weight"]).any()
    a = np.exp(values(one)["blocks.0.mixer.a_log"])
    assert ((a >= 1) & (a <= 16)).all()
    dt = np.log1p(np.exp(values(one)["blocks.0.mixer.dt_bias"]))
    assert ((dt > 0.0019) & (dt < 0.101)).all()
    assert abs(values(one)["blocks.1.mixer.experts.up"].std() * np.sqrt(32) - 1) < 0.1
    logits = nnx.jit(lambda model, tokens: model(tokens))(one, jnp.arange(1, 30)[None])
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_dummy_weights_do_not_depend_on_sharding(directory):
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    specs = {
        "blocks.3.mixer.up_proj.weight": PartitionSpec("model"),
        "blocks.3.mixer.down_proj.weight": PartitionSpec(None, "model"),
        "blocks.1.mixer.experts.down": PartitionSpec("model"),
    }
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    sharded = load(directory, load_format="dummy", sharding=shardings.get)
    assert_equal(values(sharded), values(load(directory, load_format="dummy")))
    assert {path: parameters(sharded)[path].get_value().sharding for path in specs} == shardings


# --- errors


def test_references_that_name_nothing(tmp_path):
    text = message(load, "no/such")
    assert text.startswith("no/such: no such model; expected a Hugging Face or Orbax directory, 'demo', or a published")
    (tmp_path / "file").touch()
    text = message(load, tmp_path / "file")
    assert text == f"{tmp_path}/file: is a file; give the directory that holds config.json and the weights"
    text = message(load, tmp_path)
    assert text == f"{tmp_path}: neither a Hugging Face (no config.json) nor an Orbax directory (no mamba_jax.json)"
    (tmp_path / "model-Q4_K.gguf").touch()
    for path in (tmp_path, tmp_path / "model-Q4_K.gguf"):
        said = "GGUF files are not supported; give the Hugging Face directory that it was made from"
        assert message(load, path) == f"{path}: {said}"
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model:\n- maker/original-1B\n---\n")
    assert message(load, tmp_path).endswith("that it was made from, maker/original-1B")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "maker/base"}')
    assert "is an adapter of maker/base; give that model" in message(load, tmp_path)


@pytest.mark.parametrize("narrow", [True, False])
def test_weights_in_the_form_of_mlx_name_their_original(directory, narrow):
    (directory / "README.md").write_text("base_model: 'maker/original-1B'\n")
    if narrow:
        change_config(directory, quantization_config={"group_size": 64, "bits": 4})
    else:
        save_file(load_file(directory / "model.safetensors"), directory / "model.safetensors", {"format": "mlx"})
    assert message(load, directory).endswith(
        "weights in MLX's form are not supported; give the Hugging Face directory that it was made from, "
        "maker/original-1B"
    )


def test_a_published_size_has_a_config_but_no_weights():
    name = next(iter(PRESETS))
    assert checkpoints.load_config(name).num_recurrent_layers > 0
    assert checkpoints.load_tokenizer(name) is None
    assert checkpoints.generation_config(name) == checkpoints.GenerationConfig()
    text = message(load, name)
    assert text.startswith(f"{name!r} is a published size: a configuration without weights and tokenizer")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported: known are nemotron_h, bamba, "),
        ({"model_type": "absent"}, "model_type None is not supported"),
        ({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}, "model_type 'kimi_k3' is not supp"),
        ({"mamba_num_heads": 5}, "5 Mamba heads cannot be divided into 2 Mamba groups"),
        ({"head_dim": 0}, ""),
        (b'{"model_type": ', "not valid JSON (Expecting value: line 1 column 16 (char 15))"),
        (b"[1]", "expected a JSON object, found list"),
        (b"[" * 100_000, "not valid JSON ("),
        (b"\xff\xfe", "not valid JSON ('utf-8' codec"),
    ],
)
def test_impossible_config(directory, changes, said):
    if isinstance(changes, bytes):
        (directory / "config.json").write_bytes(changes)
    else:
        change_config(directory, **changes)
    assert message(load, directory).startswith(f"{directory}/config.json: {said}")


def test_missing_tensors_are_spelled_like_those_that_are_there(directory):
    stored = load_file(directory / "model.safetensors")
    del stored["backbone.norm_f.weight"]
    renamed = {name.replace("backbone.", "model."): value for name, value in stored.items()}
    save_file(renamed, directory / "model.safetensors")
    said = f"{directory}: tensors do not fit config.json: 1 missing: model.norm_f.weight [32]"
    assert message(load, directory) == said


def test_no_tokenizer_is_an_error_only_for_those_who_need_one(directory):
    assert checkpoints.load_tokenizer(directory) is None
    text = message(checkpoints.require_tokenizer, directory)
    files = "tokenizer.json, tiktoken.model or tokenizer.model, nor a vocab.json of a known class"
    assert text == f"{directory}: has no {files}, so text cannot be used; give token ids instead"
