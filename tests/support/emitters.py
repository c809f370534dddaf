"""XLA's older emitters for CPU, which compile a step in two thirds of the time. JAX has them up to 0.10."""

from importlib.metadata import version

EXIST = version("jaxlib").startswith("0.10.")
"""Later versions of XLA end the process if they are given the flag."""
OLDER = "--xla_cpu_use_fusion_emitters=false"
OF_USERS = {"xla_cpu_use_fusion_emitters": True} if EXIST else None
"""Options of a compilation with the emitters that users have, whichever the tests have."""
