"""The family: moving averages and MLPs, with attention in the middle."""

from mamba_jax.config import HybridConfig, MLPConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, tensor
from mamba_jax.families.fields import Fields
from tests.extending.mixer import AverageConfig


def config_from_hf(raw):
    fields = Fields(raw)
    hidden, heads = fields.integer("hidden_size", 32), fields.integer("num_heads", 4)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 97),
        hidden_size=hidden,
        pattern="A-*-A-",
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention=parts.attention_config(fields, hidden, num_heads=4, num_kv_heads=2),
        mlp=MLPConfig(2 * hidden, "silu", gated=True),
        recurrences=(AverageConfig(heads, hidden // heads),),
    )


def weight_names(config):
    mixers = {"-": ("mlp", parts.mlp), "*": ("attention", parts.attention), "A": ("average", average)}
    body = parts.layers(config, mixers, norms=("norm",))
    return parts.whole_model(config, body, embed="embed.weight", prefixes=("model.", "backbone."))


def average(config, hidden):
    return {
        "log_rate": tensor("log_rate"),
        **parts.weights({part: part for part in ("in_proj", "gate_proj", "out_proj")}),
    }


FAMILY = Family("MovingAverage", ("moving_average",), config_from_hf, weight_names)
