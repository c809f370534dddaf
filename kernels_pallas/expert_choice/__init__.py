"""The choice of each token's experts, and the order of tokens by expert."""

from kernels_pallas.expert_choice.api import Choice, Rule, choose_experts

__all__ = ["Choice", "Rule", "choose_experts"]
