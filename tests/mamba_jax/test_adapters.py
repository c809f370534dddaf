"""LoRA adapters in the step: each token's result is that of its own adapter merged into the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import load_model
from checkpoints.quantized.rounding import QUANTIZATIONS
from kernels_pallas.quantized import Quantized
from mamba_jax.adapters import Adapters, adaptable_layers, targets
from mamba_jax.config import Division, UnevenDivision
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import make_mesh, shard_parameters
from mamba_jax.sharding.parameters import placement, placements
from tests.support.engines.prompt_stepper import PromptStepper
from tests.support.engines.step_programs import shared_programs
from tests.support.models.golden_case import FIXTURES, TO_HUGGING_FACE, adapted_logits
from tests.support.models.random_models import long_memory_model, random_model
from tests.support.models.tiny_configs import EVERYTHING, FOR_ENGINES, SHARED, STEP
from tests.support.selection import slow

CONFIGS = {"everything": EVERYTHING, "shared": SHARED} | {
    name: FOR_ENGINES[name] for name in ("joined", "kimi", "selective")
}
RANK = 3


def random_layers(model, seed, *, every=1, rank=RANK):
    """A random adapter of every n-th dense layer: (A, B) by path."""
    rng, layers = np.random.default_rng(seed), {}
    for path, layer in list(adaptable_layers(model).items())[::every]:
        *outputs, inputs = layer.weight.shape
        a = rng.normal(size=(rank, inputs)) / np.sqrt(inputs)
        layers[path] = a.astype(np.float32), (0.4 * rng.normal(size=(int(np.prod(outputs)), rank))).astype(np.float32)
    return layers


def merged(model, layers):
    """The definition: a model with W + B A for weights."""
    values = {path: leaf[...] for path, leaf in parameters(model).items()}
    for path, (a, b) in layers.items():
        weight = values[f"{path}.weight"]
        values[f"{path}.weight"] = weight + (b @ a).reshape(weight.shape)
    return HybridModel.from_parameters(model.config, values)


def adapted(model, *adapters, count=None):
    """The adapters of a copy of the model, in entries from 1 on."""
    stacks = Adapters(model, count=count or len(adapters), rank=RANK + 1)
    for entry, layers in enumerate(adapters, 1):
        stacks.put(entry, layers)
    return stacks


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("joined", count) for count in (2, 40)),
        *(pytest.param(name, 40, marks=pytest.mark.full) for name in CONFIGS if name != "joined"),
        *(slow(name, 2) for name in CONFIGS if name != "joined"),
    ],
)
def test_each_token_has_the_result_of_its_own_adapter(name, count):
    config = CONFIGS[name]
    model = random_model(config)
    first, second = random_layers(model, 1), random_layers(model, 2, every=2, rank=2)
    stacks = adapted(model, first, second, count=count)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 7))
    entries = np.array([1, 0, 2, 1])
    found = adapted_logits(model, stacks, tokens, entries)(stacks.arrays)
    plain = jax.jit(lambda model, tokens: model(tokens))
    each = [model, merged(model, first), merged(model, second)]
    expected = np.stack([plain(each[entry], tokens[i : i + 1])[0] for i, entry in enumerate(entries)])
    moved = np.abs(expected - np.asarray(plain(model, tokens))).max(axis=(1, 2))
    assert (moved[entries > 0] > 0.1).all()
    np.testing.assert_allclose(found, expected, atol=TO_HUGGING_FACE * max(1, np.abs(expected).max()))


@pytest.mark.smoke
@pytest.mark.parametrize("tied", [False, True])
def test_rows_have_the_embedding_and_the_head_of_their_adapter(tied):
    config = dataclasses.replace(STEP, tie_word_embeddings=tied)
    model, rng = random_model(config), np.random.default_rng(1)
    values = {path: leaf[...] for path, leaf in parameters(model).items()}
    drawn = [rng.normal(size=values["embed.weight"].shape).astype(np.float32) for _ in range(3)]
    both, head = {"embed": drawn[0], "lm_head": drawn[1]}, {"lm_head": drawn[2]}
    stacks, tokens = Adapters(model, count=2, rank=1, tables=True), rng.integers(0, config.vocab_size, (4, 7))
    run = adapted_logits(model, stacks, tokens, np.array([1, 0, 2, 1]))
    before = run(stacks.arrays)
    for entry, tables in ((1, both), (2, head)):
        stacks.put(entry, stacks.entry_of({}, tables=tables))
    found, plain = run(stacks.arrays), jax.jit(lambda model, tokens: model(tokens))
    np.testing.assert_array_equal(found[1], before[1])
    for row, tables in ((0, both), (2, head), (3, both)):
        weights = {f"{name}.weight": each for name, each in tables.items()}
        own = {"lm_head.weight": values["embed.weight"]} | values | weights
        whole = HybridModel.from_parameters(dataclasses.replace(config, tie_word_embeddings=False), own)
        np.testing.assert_allclose(found[row], plain(whole, tokens[row : row + 1])[0], atol=TO_HUGGING_FACE)
    for entry in (1, 2):
        stacks.put(entry, {})
    np.testing.assert_array_equal(run(stacks.arrays), before)
    with pytest.raises(ValueError, match="embed is a table of"):
        stacks.entry_of({}, tables={"embed": drawn[0][1:]})


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_layer_has_the_result_of_its_dequantized_weight_and_the_adapter(quantization, dtype):
    """Every dense layer, with an adapter in the dtype of activations."""
    model = load_model(FIXTURES / "qwen35-moe", dtype=dtype, quantization=quantization, progress=False)
    layers = random_layers(model, 1)
    stacks = adapted(model, layers)
    assert {array.dtype for array in stacks.arrays} == {jnp.dtype(dtype)}
    plain = {path: layer.weight[...] for path, layer in adaptable_layers(model).items()}
    narrow = [path for path, weight in plain.items() if isinstance(weight, Quantized)]
    assert len(narrow) > len(plain) // 2
    stacks.attach(model, stacks.arrays)
    rng, entries = np.random.default_rng(2), np.array([1, 0, 1])
    dequantize = jax.jit(Quantized.dequantize)
    product = jax.jit(lambda layer, x, entries: layer(x, entries, out_dtype=jnp.float32))
    for path in narrow:
        weight, (a, b) = np.asarray(dequantize(plain[path]), np.float64), layers[path]
        x = jnp.asarray(rng.normal(size=(3, weight.shape[-1])), dtype)
        found = np.asarray(product(adaptable_layers(model)[path], x, entries), np.float64)
        delta = (b.astype(np.float64) @ a).reshape(weight.shape)
        expected = np.stack(
            [(weight + entry * delta) @ row for entry, row in zip(entries, np.asarray(x, np.float64), strict=True)]
        )
        largest = np.abs(weight) + (np.abs(b) @ np.abs(a)).reshape(weight.shape)
        scale = np.abs(np.asarray(x, np.float64)) @ largest.reshape(-1, weight.shape[-1]).T
        error = np.abs(found - expected).reshape(scale.shape) / scale
        assert error.max() < (1e-6 if dtype == "float32" else 0.01), path


@pytest.mark.full
def test_loading_another_adapter_compiles_no_step():
    model, prompt = long_memory_model(STEP), np.arange(9, dtype=np.int32)
    first, other = random_layers(model, 1), random_layers(model, 9, every=3)
    programs = shared_programs(model, tile_size=32, adapters=adapted(model, first))
    stepper, compiled = PromptStepper(model, [prompt], programs=programs), []
    for layers in (first, other):
        programs.replace_adapter(1, layers)
        stepper.reset(adapters=[1])
        stepper.prefill({0: len(prompt)})
        compiled.append(programs.compilations)
        logits = jax.jit(lambda model: model(prompt[None])[0, -1])(merged(model, layers))
        found = stepper.log_probs(stepper.slot)[0]
        np.testing.assert_allclose(found, jax.nn.log_softmax(logits), atol=TO_HUGGING_FACE)
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("name", ["nemotronh", "joined"])
def test_every_adapter_is_divided_as_its_layer_is(name):
    config, mesh = FOR_ENGINES[name], make_mesh(2)
    values = {path: leaf[...] for path, leaf in parameters(random_model(config)).items()}
    model = HybridModel.from_parameters(config, shard_parameters(values, config, mesh))
    stacks = Adapters(model, count=2, rank=RANK, tables=True, mesh=mesh)
    table = np.asarray(values["embed.weight"])
    stacks.put(1, stacks.entry_of(random_layers(model, 1), tables={"embed": table}))
    whole = shard_parameters({"embed.weight": values["embed.weight"]}, config, mesh)["embed.weight"].sharding
    assert all(stacks._arrays[name].sharding == whole for name in ("embed.1", "embed.2", "lm_head.1"))
    for path, layer in adaptable_layers(model).items():
        weight = layer.weight[...]
        local = weight.addressable_shards[0].data.shape
        a, b = (stacks._arrays[f"{path}.lora.{part}"].addressable_shards[0].data.shape for part in "ab")
        assert (a[-1], b[:-2]) == (local[-1], local[:-1]), path


@pytest.mark.parametrize("devices", [2, 3], ids=["some experts each", "a piece of every expert"])
def test_matrices_of_experts_are_divided_as_the_experts_are(devices):
    moe = dataclasses.replace(EVERYTHING.moe, num_experts=4, num_groups=1, top_groups=1)
    config = dataclasses.replace(EVERYTHING, moe=moe)
    size = EVERYTHING.moe.intermediate_size
    declared = placements(config)
    for path, target in targets(random_model(config), experts=True).items():
        if not target.lead:
            continue
        weight = declared[path].over(devices) if devices == 2 or size % devices == 0 else declared[path].otherwise
        a, b = (placement(declared, f"{target.lora}.{part}") for part in "ab")
        assert isinstance(a, Division)
        assert isinstance(b, Division)
        if devices == 2:
            assert weight.axis == a.over(2).axis == b.over(2).axis == 0
        elif weight.axis == 1 + len(target.outputs):
            # The axis of inputs: A is divided, and each device has all of B.
            assert (a.otherwise.axis, b.otherwise) == (3, UnevenDivision.KEEP_WHOLE)
        else:
            assert (a.otherwise, b.otherwise.axis) == (UnevenDivision.KEEP_WHOLE, weight.axis)


def test_a_layer_without_the_tokens_adapters_is_an_error():
    model = nnx.clone(random_model(STEP))
    stacks = adapted(model, random_layers(model, 1))
    stacks.attach(model, stacks.arrays)
    with pytest.raises(ValueError, match="called without the tokens' adapters"):
        model(np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(
    ("entry", "layers", "message"),
    [
        (0, {}, "entry 0: expected 1 to 2"),
        (3, {}, "entry 3: expected 1 to 2"),
        (1, {"blocks.9.q": (np.zeros((1, 2)), np.zeros((2, 1)))}, "no layer blocks.9.q"),
        (1, {"blocks.0.mixer.out_proj": (np.zeros((1, 2)), np.zeros((2, 1)))}, r"out_proj: A is \[1, 2\]"),
        (1, {"blocks.0.mixer.out_proj": (np.zeros((9, 48)), np.zeros((24, 9)))}, "a rank of at most 4"),
        (1, {"blocks.0.mixer.out_proj": (np.zeros((1, 48)), np.full((24, 1), 1e39))}, "not finite in float32"),
    ],
)
def test_what_does_not_fit_changes_nothing(entry, layers, message):
    model = random_model(STEP)
    stacks = adapted(model, random_layers(model, 1), count=2)
    before = stacks.arrays
    with pytest.raises(ValueError, match=message):
        stacks.put(entry, layers)
    assert all(one is other for one, other in zip(before, stacks.arrays, strict=True))
