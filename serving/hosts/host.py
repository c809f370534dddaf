"""The parts of `mamba-jax serve` that are specific to several hosts."""

from __future__ import annotations

import logging

import jax

from checkpoints.errors import CheckpointError
from serving.config import ConfigError, EngineConfig
from serving.engine.build import build_engine
from serving.engine.warmup import warm_up
from serving.hosts.facts import facts_of
from serving.hosts.follower import follow
from serving.hosts.meeting import join, meet, meeting_time
from serving.hosts.party import Party
from serving.hosts.settings import HostSettings

log = logging.getLogger(__name__)


def gather(
    settings: HostSettings, config: EngineConfig, *, all_devices: bool = True
) -> tuple[Party | None, EngineConfig]:
    """Waits for the other hosts. The engine's flags come back, for all devices of all hosts.

    None: the environment knows of no other host.

    Args:
        settings: who they are.
        config: flags of the engine.
        all_devices: use all devices, whatever `tensor_parallel_size` says.

    A meeting that fails ends this process with one line (`meeting_time`).

    Raises:
        ConfigError: the environment does not say which hosts there are.
    """
    with meeting_time(settings) as end:
        join(settings)
        devices, hosts = jax.device_count(), jax.process_count()
        if hosts == 1:
            return None, config
        if all_devices:
            config = config.model_copy(update={"tensor_parallel_size": devices})
        if config.tensor_parallel_size != devices:
            raise ConfigError(
                f"tensor_parallel_size {config.tensor_parallel_size}: {hosts} hosts use all of their {devices} devices"
            )
        party = meet(settings, facts_of(config), end)
    log.info("host %d of %d%s, %d devices in all", party.host, hosts, ", the leader" if party.leads else "", devices)
    return party, config


def run_follower(config: EngineConfig, party: Party) -> None:
    """Loads this host's part of the model, and does what host 0 does until it ends. On the main thread."""
    with party.ending_together((ConfigError, CheckpointError)):
        built = build_engine(config.model_copy(update={"warmup": False}), progress=False, led=True)
        if config.warmup:
            warm_up(built.engine.loop, built.engine.vocab_size, progress=False)
        party.leave_when_asked()
        log.info("ready; host 0 takes requests")
        follow(built, party)
    party.close()
