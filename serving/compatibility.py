"""What excludes what: one table, checked once before an engine is built; docs/engine.md has the same table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mamba_jax.config import HybridConfig
from mamba_jax.programs import INVARIANT_INTERPRETED, WHY_NOT_INVARIANT
from serving.config import ConfigError, EngineConfig

_INVARIANT_DTYPES = ("float32", "bfloat16")
_INVARIANT_KEYS = 128
"""Schedule-invariant attention adds pieces of this many keys (`kernels_pallas.fixed_order`)."""


@dataclass(frozen=True)
class Deployment:
    """What an engine is to run as. Rules about what is not known yet do not apply."""

    config: EngineConfig
    model: HybridConfig | None = None
    platform: str = ""
    """`cpu`, `gpu` or `tpu`."""
    several_hosts: bool = False
    role: str | None = None
    """Of a worker of a split."""
    followed: bool = False
    """Routers follow the events of the engine."""
    padding: str = ""
    """Which heads are padded; empty if none are."""
    weight_dtypes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Condition:
    """A feature in use, or what a deployment is like."""

    text: str
    """For the table of the documentation."""
    found: Callable[[Deployment], str]
    """Returns the condition in words, as it is set; empty where it does not hold."""


@dataclass(frozen=True)
class Rule:
    """A feature that does not support something else."""

    feature: Condition
    excludes: Condition
    advice: str = ""

    def violation(self, deployment: Deployment) -> str | None:
        """Returns one line with both and the advice; None where the rule is kept."""
        feature, other = self.feature.found(deployment), self.excludes.found(deployment)
        if not (feature and other):
            return None
        return f"{feature} does not support {other}" + (f"; {self.advice}" if self.advice else "")


def check(deployment: Deployment) -> None:
    """Raises `ConfigError` with the first rule of the table that a deployment violates."""
    for rule in RULES:
        if (violation := rule.violation(deployment)) is not None:
            raise ConfigError(violation)


def _flag(name: str, *allowed: Any) -> Condition:
    """A flag that is set, or that has another value than those allowed."""

    def found(deployment: Deployment) -> str:
        value = getattr(deployment.config, name)
        if value in (allowed or (None, False)):
            return ""
        return f"{name} {value}" if allowed else name

    values = " or ".join(str(value) for value in allowed if value is not None)
    return Condition(f"`{name}`" + (f" other than {values}" if allowed else ""), found)


def _model(text: str, lacks: Callable[[HybridConfig], bool]) -> Condition:
    def found(deployment: Deployment) -> str:
        model = deployment.model
        return "" if model is None or not lacks(model) else f"this {model.family} model, which has no {text}"

    return Condition(f"models without {text}", found)


def _rank(deployment: Deployment) -> str:
    rank = deployment.config.max_lora_rank if deployment.config.enable_lora else 1
    return f"max_lora_rank {rank}" if rank & (rank - 1) else ""


def _page_size(deployment: Deployment) -> str:
    size = deployment.config.page_size_on(deployment.platform)
    return f"page_size {size}" if deployment.platform and _INVARIANT_KEYS % size else ""


def _only_on_cpu(deployment: Deployment) -> str:
    config, model = deployment.config, deployment.model
    interpreted = config.kernels == INVARIANT_INTERPRETED
    if deployment.platform in ("", "cpu") and not interpreted:
        return ""
    parts = {"enable_lora": config.enable_lora}
    if model is not None:
        parts |= {"routed experts": model.experts_per_token > 0}
        parts |= {one.varying_bits_of_kernels: True for one in model.recurrences if one.varying_bits_of_kernels}
    place = "in the interpreter" if interpreted else f"on {deployment.platform.upper()}"
    return next((f"{part} {place}" for part, there in parts.items() if there), "")


def _recurrence(deployment: Deployment) -> str:
    model = deployment.model
    names = [] if model is None else [one.varying_bits for one in model.recurrences if one.varying_bits]
    return f"the {names[0]} of this {model.family} model" if model is not None and names else ""


def _weights(deployment: Deployment) -> str:
    other = sorted(deployment.weight_dtypes - set(_INVARIANT_DTYPES))
    return f"weights in {', '.join(other)}" if other else ""


def _attention_kernel(deployment: Deployment) -> str:
    named = deployment.config.kernels.replace(" ", "").split(",")
    return next((f"kernels {each}" for each in named if each.startswith("paged_attention=")), "")


ADAPTERS = Condition("`enable_lora`, `max_initial_states`", lambda of: of.config.adapter_flag)
LORA, LORA_EXPERTS, DRAFTER = _flag("enable_lora"), _flag("lora_experts"), _flag("speculative_model")
EXPERTS, MASKS = _flag("enable_return_routed_experts"), _flag("enable_return_sampling_mask")
INVARIANT = _flag("schedule_invariant")
CONTEXT, REPLICAS = _flag("context_parallel_size", 1), _flag("data_parallel_size", 1)
TIERS = Condition(
    "`host_cache_gib`, `disk_cache`",
    lambda of: "host_cache_gib" if of.config.host_cache_gib else "disk_cache" if of.config.disk_cache else "",
)
HOSTS = Condition("several hosts", lambda of: "several hosts" if of.several_hosts else "")
ROLE = Condition("`--role`", lambda of: f"--role {of.role}" if of.role else "")
_ROUTERS = "--split-secret or --kv-events-config (routers that follow it)"
FOLLOWED = Condition("`--split-secret` or `--kv-events-config`", lambda of: _ROUTERS if of.followed else "")
PADDED = Condition("padded heads", lambda of: f"padded heads ({of.padding})" if of.padding else "")
WITHOUT_EXPERTS = _model("routed experts", lambda model: not model.experts_per_token)
WITHOUT_ATTENTION = _model("attention, whose pages hold the experts", lambda model: not model.num_attention_uses)
_OTHER_DRAFTS = "use mtp or ngram drafts"

RULES = (
    Rule(ADAPTERS, HOSTS, "use one host or merge the adapter"),
    Rule(LORA, PADDED, "use a tensor_parallel_size that divides the heads, or merge the adapter"),
    Rule(LORA_EXPERTS, WITHOUT_EXPERTS, "leave the flag out"),
    Rule(DRAFTER, HOSTS, _OTHER_DRAFTS),
    Rule(REPLICAS, HOSTS, "start a server on each host"),
    Rule(REPLICAS, ROLE, "start a worker for each replica"),
    Rule(REPLICAS, FOLLOWED, "start a server for each replica"),
    Rule(CONTEXT, Condition("`kernels` with `paged_attention=`", _attention_kernel), "name paged_attention_part"),
    Rule(ROLE, HOSTS, "use one host"),
    Rule(FOLLOWED, HOSTS, "use one host"),
    Rule(TIERS, HOSTS, "use one host"),
    Rule(EXPERTS, WITHOUT_EXPERTS, "leave the flag out"),
    Rule(EXPERTS, WITHOUT_ATTENTION),
    # States that arrive from a tier or from another worker bring keys and values, but no experts.
    Rule(EXPERTS, TIERS),
    Rule(EXPERTS, HOSTS),
    Rule(EXPERTS, ROLE),
    Rule(MASKS, ROLE),
    Rule(
        INVARIANT,
        Condition("`enable_lora`, routed experts or Mamba-1 on platforms other than CPU", _only_on_cpu),
        "use a CPU, with kernels auto",
    ),
    Rule(INVARIANT, HOSTS, "use one host"),
    Rule(
        INVARIANT,
        Condition(
            "installations without the C++ operations, on CPU",
            lambda of: (
                f"an installation without the C++ operations ({WHY_NOT_INVARIANT})"
                if WHY_NOT_INVARIANT and of.platform == "cpu" and of.config.kernels != INVARIANT_INTERPRETED
                else ""
            ),
        ),
    ),
    Rule(INVARIANT, _flag("dtype", "auto", *_INVARIANT_DTYPES), "use float32 or bfloat16"),
    Rule(INVARIANT, _flag("ssm_dtype", "float32"), "use float32"),
    Rule(INVARIANT, _flag("kv_cache_dtype", "auto"), "use auto"),
    Rule(INVARIANT, DRAFTER, _OTHER_DRAFTS),
    Rule(INVARIANT, _flag("kernels", "auto", INVARIANT_INTERPRETED), "use auto"),
    Rule(INVARIANT, _flag("kernel_check", "auto", "off"), "use auto: `mamba-jax check` compares bits"),
    Rule(INVARIANT, _flag("logprobs_mode", "raw_logprobs"), "use raw_logprobs"),
    Rule(INVARIANT, _flag("replay_interval", None, 1), "use 1"),
    Rule(
        INVARIANT,
        Condition(
            "a narrower `checkpoint_dtype`",
            lambda of: f"checkpoint_dtype {of.config.checkpoint_dtype}" if of.config.narrows_states else "",
        ),
        "use auto",
    ),
    Rule(INVARIANT, Condition("a `max_lora_rank` that is no power of two", _rank), "use a power of two"),
    Rule(
        INVARIANT,
        Condition(f"a `page_size` that does not divide {_INVARIANT_KEYS}", _page_size),
        f"use a divisor of {_INVARIANT_KEYS}",
    ),
    Rule(INVARIANT, Condition("lightning attention, the recurrence of RecurrentGemma", _recurrence)),
    Rule(INVARIANT, Condition("unquantized weights in other dtypes than float32 and bfloat16", _weights)),
)
"""A deployment is refused by the first rule that it violates."""
