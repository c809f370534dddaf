"""Which kernels an engine uses: by the flag `kernels`, the check of this machine, and fixed orders."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from mamba_jax.programs import INVARIANT, INVARIANT_INTERPRETED, KernelChoice, UnsupportedError, instructions
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.devices import of_first_process
from serving.engine.assembly.kernel_check import refused_kernels


def refused_on_all(config: EngineConfig, led: bool) -> Mapping[tuple[str, str], str]:
    """Returns the kernels that the check refuses. Where several processes run the same programs, the verdict of the
    first one holds for all: it has checked before JAX joined their devices (`serving.hosts.host.gather`), or it tries.

    Raises:
        ConfigError: a kernel that `kernels` names did not pass.
    """
    if not led and not (jax.distributed.is_initialized() and jax.process_count() > 1):
        return refused_kernels(config)
    found, wrong = {}, ""
    if jax.process_index() == 0:
        again = config.model_copy(update={"kernel_check": "auto"}) if config.kernel_check == "always" else config
        try:
            found = refused_kernels(again)
        except ConfigError as error:  # all processes must hear of it
            wrong = str(error)
    told, wrong = of_first_process([[[*names, why] for names, why in found.items()], wrong])
    if wrong:
        raise ConfigError(wrong)
    return {(operation, kernel): why for operation, kernel, why in told}


def source_of_bits(kernels: KernelChoice, mesh: Mesh | None = None) -> str:
    """What a schedule-invariant program's bits depend on besides its inputs: equal texts mean equal bits."""
    axes = {} if mesh is None else mesh.shape
    named = "-".join([str(kernels.named), *(f"{axis} {size}" for axis, size in axes.items() if size > 1)])
    if kernels.platform == "cpu":
        return f"{named}-{instructions()}"
    # Another compiler may choose other instructions for the same kernels.
    device = kernels.device
    made_for = "" if device is None else f"{device.device_kind}, {device.client.platform_version}"
    return f"{named}-{' '.join(made_for.split())}, JAX {jax.__version__}"


def kernel_choice(config: EngineConfig, refused: Mapping[tuple[str, str], str] | None = None) -> KernelChoice:
    """Returns the kernel implementations that the flag `kernels` selects, without those that are refused.

    Raises:
        ConfigError: the flag is malformed.
    """
    if config.schedule_invariant:
        return KernelChoice(named=INVARIANT if config.kernels == "auto" else config.kernels)
    if config.kernels in (INVARIANT, INVARIANT_INTERPRETED):
        raise ConfigError(f"kernels is {config.kernels!r}: set schedule_invariant too, which checks what it needs")
    try:
        return KernelChoice.parse(config.kernels, refused=refused)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from None
