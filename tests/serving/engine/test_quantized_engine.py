"""A mixed checkpoint (NVFP4 experts, FP8 Mamba projections, the rest wide) in every arrangement: the same tokens."""

import dataclasses
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mamba_jax.model import parameters
from mamba_jax.sharding import TENSOR
from serving import LLM, SamplingParams
from tests.support.engines.engine_harness import SMALL
from tests.support.models.golden_case import FIXTURES, TO_HUGGING_FACE, assert_greedy, chosen_logprobs, shared_block
from tests.support.models.quantized_checkpoints import METHODS, config_of, write_mixed, write_quantized
from tests.support.selection import some_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = SMALL | {"debug_state": True, "load_format": "auto", "replay_interval": 1}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)
DRAFTS = {"speculative_method": "mtp", "num_speculative_tokens": 2}
GUESSED = {"speculative_method": "ngram", "num_speculative_tokens": 3, "adaptive_drafts": False}
ARRANGEMENTS = {
    "no cache": {"mamba_cache_mode": "none"},
    "align": {"mamba_cache_mode": "align"},
    "align, two members": {"mamba_cache_mode": "align", "context_parallel_size": 2},
    "all, drafts": {"mamba_cache_mode": "all"} | DRAFTS,
    "all, drafts, two devices": {"mamba_cache_mode": "all", "tensor_parallel_size": 2} | DRAFTS,
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return write_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.mark.full
@pytest.mark.parametrize("name", some_slow(ARRANGEMENTS, "all, drafts"))
def test_chooses_what_the_wide_weights_choose(mixed, name, monkeypatch):
    if "members" in name:
        monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)  # they divide prefill
    llm = LLM(mixed[0], **(FLAGS | ARRANGEMENTS[name]))
    outputs = [llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0] for ids in shared_block()]
    cached = [output.num_cached_tokens for output in outputs]
    assert cached == ([0, 0, 0] if name == "no cache" else [0, 32, cached[2]])
    assert name == "no cache" or cached[2] >= 32
    llm.engine.loop.scheduler.check(idle=True)
    assert_greedy(outputs, mixed[1])


TOOLS = FIXTURES / "quantized"


@pytest.mark.full
@pytest.mark.parametrize("form", sorted(each.name for each in TOOLS.iterdir()))
@pytest.mark.parametrize("mode", ["none", "all"])
def test_files_of_quantization_tools_say_what_transformers_says_of_their_weights(form, mode):
    """`golden/make_quantized.py` writes them."""
    with np.load(TOOLS / form / "expected.npz") as golden:
        prompt, tokens = golden["prompt"].tolist(), golden["tokens"].tolist()
        expected = golden["logprobs"][np.arange(len(prompt + tokens) - 1), (prompt + tokens)[1:]]
    llm = LLM(TOOLS / form, **(FLAGS | GUESSED | {"dtype": "float32", "mamba_cache_mode": mode}))
    for scored in (0, None):  # the second time, the prompt's state is found in mode `all`
        params = dataclasses.replace(GREEDY, max_tokens=len(tokens), prompt_logprobs=scored)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        given = [each[t].logprob for each, t in zip((output.prompt_logprobs or [])[1:], prompt[1:], strict=False)]
        assert list(output.outputs[0].token_ids) == tokens
        found = given + chosen_logprobs(output.outputs[0])
        np.testing.assert_allclose(found, expected[-len(found) :], atol=TO_HUGGING_FACE)
    assert bool(output.num_cached_tokens) == (mode != "none")


def said(directory, **flags):
    """Log-probabilities of a prompt's tokens by the engine, which reads keys and values from pages."""
    llm = LLM(directory, **(FLAGS | {"max_num_batched_tokens": 32} | flags))
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": shared_block()[0]}, params, use_tqdm=False)
    return np.array([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])


@pytest.mark.usefixtures("few_tokens_are_divided")
@pytest.mark.full
def test_keys_and_values_in_8_bits_are_divided_by_the_checkpoints_scales(tmp_path):
    """Those of a checkpoint whose keys and values are too large for 8 bits, and which says by what to divide them."""
    description, _ = METHODS["compressed FP8 channel"]
    directory, _ = write_quantized(tmp_path / "keys", config_of("granite"), {}, description, kv_scales=64.0)
    tensors = {name: np.array(view) for name, view in load_file(directory / "model.safetensors").items()}
    for name, value in tensors.items():
        for part, factor in (("q_proj", 2.0**-12), ("k_proj", 2.0**12), ("v_proj", 2.0**12), ("o_proj", 2.0**-12)):
            if f"self_attn.{part}.weight" in name:
                tensors[name] = (value.astype(np.float32) * factor).astype(value.dtype)
    save_file(tensors, directory / "model.safetensors")
    wide = said(directory)
    rounded = said(directory, kv_cache_dtype="fp8")
    narrow = np.abs(rounded - wide).max()
    assert 1e-4 < narrow < 0.2
    for devices in ({"tensor_parallel_size": 2}, {"context_parallel_size": 2}):
        assert np.abs(said(directory, kv_cache_dtype="fp8", **devices) - rounded).max() < narrow / 2
    shutil.copytree(directory, tmp_path / "unscaled")
    left = {name: value for name, value in tensors.items() if not name.endswith(("k_scale", "v_scale"))}
    save_file(left, tmp_path / "unscaled" / "model.safetensors")
    np.testing.assert_allclose(said(tmp_path / "unscaled"), wide, atol=1e-5)
    assert np.abs(said(tmp_path / "unscaled", kv_cache_dtype="fp8") - wide).max() > 5 * narrow


def test_scales_lie_where_their_values_lie(mixed):
    llm = LLM(mixed[0], **(FLAGS | {"tensor_parallel_size": 2}))
    found = {path: leaf[...].sharding.spec for path, leaf in parameters(llm.model).items()}
    for path, divided in (
        ("blocks.0.mixer.in_proj_zx.weight.values", (None, TENSOR)),
        ("blocks.0.mixer.in_proj_zx.weight.channel_scale", (None, TENSOR)),
        ("blocks.0.mixer.out_proj.weight.values", (None, TENSOR)),
        ("blocks.0.mixer.out_proj.weight.channel_scale", ()),
        ("blocks.1.mixer.experts.up.values", (TENSOR,)),
        ("blocks.1.mixer.experts.up.group_scale", (TENSOR,)),
        ("blocks.1.mixer.experts.down.channel_scale", (TENSOR,)),
        ("blocks.1.mixer.shared.up_proj.weight.channel_scale", (TENSOR,)),
    ):
        spec = list(found[path])
        while spec and spec[-1] is None:
            spec.pop()
        assert tuple(spec) == divided, path
