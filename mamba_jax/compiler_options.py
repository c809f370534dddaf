"""Options of XLA's compilers that step programs are compiled with."""

from typing import Any

_GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES,CONDITIONAL,WHILE"


def compiler_options(platform: str) -> dict[str, Any]:
    """Options for step programs on `platform`, as `jax.stages.Lowered.compile` takes them.

    On a GPU, XLA puts kernels into CUDA graphs, by default without conditionals, loops and collectives. A decode step
    has two conditionals (sampling and log-probabilities), so it would be several graphs with single kernels between
    them, each of which the host launches. With these options a decode step is one graph. XLA leaves out what the
    driver does not support.
    """
    return {"xla_gpu_enable_command_buffer": _GRAPH_COMMANDS} if platform in ("gpu", "cuda") else {}
