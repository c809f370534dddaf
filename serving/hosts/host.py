"""The parts of `mamba-jax serve` that are specific to several hosts."""

from __future__ import annotations

import hashlib
import logging
from importlib.metadata import version

import jax

from checkpoints import load_config
from checkpoints.errors import CheckpointError
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import build_engine
from serving.engine.programs.warmup import warm_up
from serving.hosts.host_group import HostGroup
from serving.hosts.lockstep import follow
from serving.hosts.meeting import meet
from serving.hosts.settings import HostSettings

log = logging.getLogger(__name__)

_OWN = {"model", "tokenizer", "download_dir", "chat_template", "compilation_cache"}
"""Flags that may differ: where a host keeps files. The model is compared by its structure, and by its weights once they
are loaded (`Leader.wait_until_ready`)."""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def gather(
    settings: HostSettings, config: EngineConfig, *, all_devices: bool = True
) -> tuple[HostGroup | None, EngineConfig]:
    """Waits for the other hosts (`meet`). The engine's flags come back, for all devices of all hosts.

    None: the environment knows of no other host.

    Args:
        settings: who they are.
        config: flags of the engine.
        all_devices: use all devices, whatever `tensor_parallel_size` says.

    Raises:
        ConfigError: the hosts did not connect, or the environment does not say which hosts there are.
        CheckpointError: the model's configuration cannot be read.
    """
    group = meet(settings, facts_of(config))
    if group is None:
        return None, config
    devices, hosts = jax.device_count(), jax.process_count()
    if all_devices:
        config = config.model_copy(update={"tensor_parallel_size": devices})
    if config.tensor_parallel_size != devices:
        group.end(
            f"tensor_parallel_size {config.tensor_parallel_size}: {hosts} hosts use all of their {devices} devices",
            code=2,
        )
    log.info("host %d of %d%s, %d devices in all", group.host, hosts, ", the leader" if group.leads else "", devices)
    return group, config


def run_follower(config: EngineConfig, group: HostGroup) -> None:
    """Loads this host's part of the model, and repeats the calls of host 0 until it ends. Runs on the main thread."""
    with group.ending_together((ConfigError, CheckpointError)):
        built = build_engine(config.model_copy(update={"warmup": False}), progress=False, led=True)
        if config.warmup:
            warm_up(built.engine.loop, built.engine.vocab_size, progress=False)
        group.forward_signals()
        log.info("ready; host 0 takes requests")
        follow(built, group)
    group.exit()


def facts_of(config: EngineConfig) -> dict[str, str]:
    """What must be the same on all hosts before they can run the same programs, by name.

    Raises:
        CheckpointError: the model's configuration cannot be read.
    """
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in config if name not in _OWN}
    described = load_config(config.model, hf_overrides=config.hf_overrides)
    structure = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    return flags | {f"the version of {name}": version(name) for name in _PACKAGES} | {"the model": structure}
