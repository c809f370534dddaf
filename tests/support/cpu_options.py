"""Options of XLA for CPU that tests set where JAX is known to have them.

The older emitters compile a step in two thirds of the time; JAX has them up to 0.10. Devices of a CPU that wait for
each other end the process after 40 seconds, which a busy machine may take.
"""

from importlib.metadata import version

EXIST = version("jaxlib").startswith("0.10.")
"""Later versions of XLA end the process if they are given the flag."""
OLDER = "--xla_cpu_use_fusion_emitters=false"
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
OF_USERS = {"xla_cpu_use_fusion_emitters": True} if EXIST else None
"""Options of a compilation with the emitters that users have, whichever the tests have."""
