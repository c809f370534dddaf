"""Writes `quantized/NAME`: a tiny Falcon-H1 as a tool saves it, and log-probabilities of what that stands for.

`python -m golden.make_quantized NAME...` in tests/, with the `parity` extra and the tools: compressed-tensors 0.20.0,
bitsandbytes 0.50.2, nvidia-modelopt 0.47.0, auto-round 0.16.1 and gptqmodel 7.7.0. `expected.npz` has a prompt with the
greedy continuation by transformers, and the log-probabilities after each token: of the weights as the tool itself
dequantizes them, and of all other tensors as they are in the file. (Tools round some: AutoRound writes `A_log` in
bfloat16, and transformers would read it so.)
"""

import copy
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden import oracle
from golden.recipes import RECIPES
from safetensors.torch import load_file
from torch import Tensor

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 16, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_d_state": 8, "tie_word_embeddings": False,
}  # fmt: skip
"""Outputs and inputs that 32 divides: some tools leave others as they are."""
RECIPE = dataclasses.replace(RECIPES["falconh1"], config=RECIPES["falconh1"].config | SIZES, seed=5)
PROMPT = [*np.random.default_rng(3).integers(3, 128, 12).tolist()] * 3
CALIBRATION = [np.random.default_rng(i).integers(3, 128, 64).tolist() for i in range(16)]
Weights = dict[str, Tensor]


def linears(model: Any) -> dict[str, Any]:
    """The modules whose weights tools quantize, by name."""
    places = ("self_attn", "mamba", "feed_forward")
    return {n: m for n, m in model.named_modules() if n.endswith("_proj") and n.split(".")[-2] in places}


def any_tokenizer() -> Any:
    """What some tools require."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({str(i): i for i in range(128)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="0", eos_token="2")


def compressed_tensors(model: Any, scheme: str, to: Path) -> Weights:
    """By its calibration functions. Groups and blocks are those of the scheme, or 32 if that is too many here."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    one = preset_name_to_scheme(scheme, ["Linear"])
    how = one.weights
    how.group_size = how.group_size and min(how.group_size, 32)
    how.block_structure = how.block_structure and [32, 32]
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": one}, ignore=["lm_head"]))
    weights = {}
    for name, layer in linears(model).items():
        weight, more = layer.weight.data, {}
        outputs, inputs = weight.shape
        rows = {"tensor": outputs, "block": 32}.get(how.strategy, 1)
        size = how.group_size or (32 if how.strategy == "block" else inputs)
        split = weight.reshape(outputs // rows, rows, inputs // size, size)
        if hasattr(layer, "weight_global_scale"):
            whole = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            layer.weight_global_scale.data = more["global_scale"] = whole
        scale, zero = calculate_qparams(split.amin((1, 3)), split.amax((1, 3)), how, **more)
        layer.weight_scale.data = scale.to(layer.weight_scale.dtype).reshape(layer.weight_scale.shape)
        if getattr(layer, "weight_zero_point", None) is not None:
            layer.weight_zero_point.data = zero.to(layer.weight_zero_point.dtype).reshape(layer.weight_scale.shape)
        if getattr(layer, "input_scale", None) is not None:
            layer.input_scale.data.fill_(0.02)
        zero = getattr(layer, "weight_zero_point", None)
        weights[name] = fake_quantize(weight, layer.weight_scale, zero, how, **more)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(to)
    compressor.update_config(to)
    return weights


def bitsandbytes(model: Any, scheme: str, to: Path) -> Weights:
    """By transformers."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(to / "wide")
    kind, _, nested = scheme.partition("-")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(nested)}
    how = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    few = AutoModelForCausalLM.from_pretrained(to / "wide", quantization_config=how, dtype=torch.float32)
    shutil.rmtree(to / "wide")
    weights = {}
    for name, one in linears(few).items():
        if kind == "int8":
            weights[name] = one.weight.data * (one.weight.SCB[:, None] / 127)
            continue
        # With one block a row: on CPU, the tool misplaces the factors of blocks that cross rows.
        state, shape = copy.copy(one.weight.quant_state), one.weight.quant_state.shape
        state.shape = torch.Size((shape.numel() // state.blocksize, state.blocksize))
        weights[name] = bitsandbytes.functional.dequantize_4bit(one.weight.data, state).reshape(shape)
    few.save_pretrained(to)
    return weights


def model_optimizer(model: Any, scheme: str, to: Path) -> Weights:
    """Calibrated on random tokens; by the definition of its files, as it rounds weights again when it writes them."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    how = copy.deepcopy(getattr(mtq, f"{scheme}_CFG"))
    if scheme.startswith("W4A8"):  # groups of 128 inputs
        how["quant_cfg"][1]["cfg"][0]["block_sizes"][-1] = 32
    few = mtq.quantize(model, how, lambda m: [m(torch.tensor([ids])) for ids in CALIBRATION])
    export_hf_checkpoint(few, export_dir=to)
    stored, weights = load_file(to / "model.safetensors"), {}
    for name in linears(model):
        value, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"].float()
        blocks, scale = scale.ndim == 4, scale.reshape(len(scale) if scale.ndim else 1, -1)
        if value.dtype == torch.uint8:
            value = torch.stack([value & 15, value >> 4], 1).reshape(-1, value.shape[1]).to(torch.int8)
            value = torch.where(value > 7, value - 16, value)
        for axis, size in enumerate(value.shape):
            scale = scale.repeat_interleave(128 if blocks else size // scale.shape[axis], axis)
        weights[name] = value.float() * scale[: value.shape[0], : value.shape[1]]
        weights[name] *= stored.get(f"{name}.pre_quant_scale", torch.ones(1)).float()
    return weights


def auto_round(model: Any, scheme: str, to: Path) -> Weights:
    """Rounded to the nearest, in three layouts, with and without zero points: as the tool packs them, in float32.

    (Its own layers round the products of integers and scales to float16, which is 6e-4 off with 8 bits.)
    """
    from auto_round import AutoRound

    bits, layout, *more = scheme.split("-")
    options = {"iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    tool = AutoRound(model, any_tokenizer(), bits=int(bits), group_size=32, sym=not more, **options)
    weights = {}
    for name, one in linears(tool.quantize()[0]).items():
        scale = one.scale.float().repeat_interleave(32, 1)
        weights[name] = (one.weight.data.float() / scale).round() * scale
    tool.save_quantized(str(to), format=layout, inplace=False)
    return weights


def gptq_model(model: Any, scheme: str, to: Path) -> Weights:
    """Calibrated on random tokens."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    bits, *more = scheme.split("-")
    options = {"desc_act": "order" in more, "sym": "asym" not in more}
    if "dynamic" in more:
        options["dynamic"] = {r".*\.feed_forward\..*": {"bits": 8}, r"-:.*\.mamba\..*": {}}
    model.save_pretrained(to / "wide")
    any_tokenizer().save_pretrained(to / "wide")
    how = QuantizeConfig(bits=int(bits), group_size=32, device="cpu", offload_to_disk=False, **options)
    tool = GPTQModel.load(str(to / "wide"), how)
    tool.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in CALIBRATION], batch_size=1)
    tool.save(str(to))
    few = GPTQModel.load(str(to), device="cpu", dtype=torch.float16, backend=BACKEND.TORCH).model.float()
    # The class's function: the object's own is compiled, which takes minutes.
    return {name: type(one).dequantize_weight(one).T for name, one in linears(few).items() if hasattr(one, "qweight")}


CT = ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
MO = ("FP8_DEFAULT", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "INT8_SMOOTHQUANT", "W4A8_AWQ_BETA")
AR = ("4-auto_round", "4-auto_gptq", "4-auto_awq", "2-auto_round", "8-auto_round", "8-auto_gptq")
AR += ("4-auto_gptq-asym", "4-auto_awq-asym", "2-auto_round-asym")
TOOLS: dict[str, tuple[Callable[[Any, str, Path], Weights], tuple[str, ...]]] = {
    "compressed-tensors": (compressed_tensors, CT),
    "bitsandbytes": (bitsandbytes, ("int8", "nf4", "nf4-nested", "fp4")),
    "modelopt": (model_optimizer, MO),
    "auto-round": (auto_round, AR),
    "gptqmodel": (gptq_model, ("4", "4-asym", "4-order", "8", "4-dynamic")),
}
NAMES = {f"{tool} {scheme}".replace(" ", "_"): (tool, scheme) for tool, (_, some) in TOOLS.items() for scheme in some}


def make(name: str, to: Path) -> None:
    """Writes one directory."""
    tool, scheme = NAMES[name]
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    model, wide = oracle.build(RECIPE), oracle.build(RECIPE)
    model.config.architectures = [RECIPE.architecture]
    weights = TOOLS[tool][0](model, scheme, to)
    stored, own = load_file(to / "model.safetensors"), wide.state_dict()
    floats = (torch.float32, torch.float16, torch.bfloat16)
    plain = {name: stored[name].float() for name in own if name in stored and stored[name].dtype in floats}
    narrow = [name for name in weights if f"{name}.weight" not in plain]
    wide.load_state_dict(own | {f"{name}.weight": weights[name].float() for name in weights} | plain)
    with torch.inference_mode():
        tokens, gaps = oracle.greedy(wide, PROMPT, 12)
        found = oracle.log_probs(wide, PROMPT + tokens).numpy()
    np.savez(to / "expected.npz", prompt=PROMPT, tokens=tokens, gaps=gaps, logprobs=found)
    keep = ("config.json", "hf_quant_config.json", "quantize_config.json", "model.safetensors", "expected.npz")
    for path in to.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.name in keep or path.unlink()
    size = sum(path.stat().st_size for path in to.iterdir())
    print(f"{name}: {size // 1000} kB, {len(narrow)} narrow, gaps {min(gaps):.3f}, {json.dumps(sorted(set(tokens)))}")


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        make(each, Path(__file__).parent / "quantized" / each)
