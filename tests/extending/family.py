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
    body = {}
    for i, kind in enumerate(config.pattern):
        path, name = f"blocks.{i}", f"layers.{i}"
        body[f"{path}.norm.weight"] = tensor(f"{name}.norm.weight")
        if kind == "-":
            body |= parts.mlp(f"{path}.mixer", f"{name}.mlp", gated=True, bias=False)
        elif kind == "*":
            body |= parts.attention(f"{path}.mixer", f"{name}.attention", config.attention)
        else:
            body[f"{path}.mixer.log_rate"] = tensor(f"{name}.average.log_rate")
            for part in ("in_proj", "gate_proj", "out_proj"):
                body |= parts.linear(f"{path}.mixer.{part}", f"{name}.average.{part}")
    return parts.whole_model(config, body, embed="embed.weight", norm="norm.weight", prefixes=("model.", "backbone."))


FAMILY = Family("MovingAverage", ("moving_average",), config_from_hf, weight_names, parts.always_ignored)
