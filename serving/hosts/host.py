"""The parts of `mamba-jax serve` that are specific to several hosts.

The leader sends each batch before it dispatches it, and followers repeat it: all hosts make the same calls in step. A
batch is sent as its place in the order of calls, a digest of its form, then its arrays as they lie in memory. Nothing
is executed to read one: a host only fills batches of the forms that it has programs for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import struct
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NoReturn

import jax
import numpy as np

from checkpoints import load_config
from checkpoints.errors import CheckpointError
from mamba_jax.program_cache import Look, look_of
from mamba_jax.programs import Batch
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import AssembledEngine, build_engine
from serving.engine.assembly.kernel_check import CHECK_SECONDS, checks_kernels, refused_kernels
from serving.engine.steps.loop import StepLoop
from serving.engine.steps.warm_up import warm_up
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind
from serving.hosts.meeting import meet
from serving.hosts.settings import HostSettings

_HEADER = struct.Struct(">Q16s")


class WireError(ValueError):
    """Malformed batch, or one without a program. The message continues "cannot follow call N: "."""


def to_bytes(number: int, batch: Batch) -> list[bytes | memoryview]:
    """A call with its place in the order of all calls, in pieces that need not be copied together."""
    arrays = (np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(batch))
    contents = (array.reshape(-1).view(np.uint8).data for array in arrays)
    return [_HEADER.pack(number, _digest(look_of(batch))), *contents]


class Receiver:
    """Reads messages. `batches`: one of each form that may come, those of the warm-up."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._forms: dict[bytes, Any] = {_digest(look_of(batch)): jax.tree.flatten(batch) for batch in batches}

    def from_bytes(self, message: bytes) -> tuple[int, Batch]:
        """Returns the number and the batch of a message of `to_bytes`.

        Raises:
            WireError: it is malformed, or of no known form.
        """
        if len(message) < _HEADER.size:
            raise WireError("no header")
        number, digest = _HEADER.unpack_from(message)
        if digest not in self._forms:
            raise WireError("there is no program for it")
        leaves, structure = self._forms[digest]
        if len(message) != (size := _HEADER.size + sum(leaf.nbytes for leaf in leaves)):
            raise WireError(f"{len(message)} bytes, expected {size}")
        arrays, at = [], _HEADER.size
        for leaf in leaves:
            array = np.frombuffer(message, leaf.dtype, count=leaf.size, offset=at).reshape(leaf.shape)
            # A program for numbers is not the one for arrays without dimensions.
            arrays.append(array if isinstance(leaf, np.ndarray) else array[()])
            at += leaf.nbytes
        return number, jax.tree.unflatten(structure, arrays)


@functools.cache  # one for each program
def _digest(look: Look) -> bytes:
    return hashlib.sha256(repr(look).encode()).digest()[:16]


log = logging.getLogger(__name__)

_OWN = {"model", "tokenizer", "download_dir", "chat_template", "compilation_cache"}
"""Flags that may differ: where a host keeps files. The model is compared by its structure, and by its weights once they
are loaded (`Leader.wait_until_ready`)."""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def gather(
    settings: HostSettings, config: EngineConfig, *, all_devices: bool = True
) -> tuple[HostGroup | None, EngineConfig]:
    """Waits for the other hosts (`meet`). Returns the group, None if the environment knows of no other host, and the
    engine's flags for all devices of all hosts; `all_devices`: use all, whatever `tensor_parallel_size` says.

    Raises:
        ConfigError: the hosts did not connect, or the environment does not say which hosts there are.
        CheckpointError: the model's configuration cannot be read.
    """
    if settings.in_environment(os.environ).host_id == 0:
        # While no process has a device. The verdict is kept, and holds for all hosts once they have met.
        with contextlib.suppress(ConfigError):
            refused_kernels(config)
    elif checks_kernels(config):  # host 0 does, before it answers
        settings = settings.model_copy(update={"meeting_timeout": settings.meeting_timeout + CHECK_SECONDS})
    group = meet(settings, facts_of(config))
    if group is None:
        return None, config
    devices, hosts, members = jax.device_count(), jax.process_count(), config.context_parallel_size
    if all_devices:
        config = config.model_copy(update={"tensor_parallel_size": max(1, devices // members)})
    if config.tensor_parallel_size * members != devices:
        context = f"context_parallel_size {members} with " if members > 1 else ""
        group.end(
            f"{context}tensor_parallel_size {config.tensor_parallel_size}: {hosts} hosts use all of their {devices} "
            "devices",
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


class Leader:
    """A loop's `followers`: from now on, the loop of the leader's engine dispatches nothing that the others do not.
    `digest`: of the weights that this host has loaded; those of all hosts must be equal."""

    def __init__(self, loop: StepLoop, group: HostGroup, digest: str) -> None:
        self._group, self._digest, self._number = group, digest, 0
        loop.followers = self

    def wait_until_ready(self) -> None:
        """Returns when every host has loaded the same weights and compiled its programs; otherwise all hosts end."""
        self._group.tell(Kind.READY)
        for host, digest in self._group.wait_until_ready().items():
            if digest != self._digest:
                self._group.end(
                    f"host {host} has loaded other weights than host 0 (digest {digest[:8]} there, {self._digest[:8]} "
                    "on host 0); give all hosts the same files, or the same --model and --revision",
                    code=2,
                )

    def call(self, batch: Batch) -> None:
        """The next call for all followers; the loop dispatches it right after."""
        self._group.tell(Kind.CALL, *to_bytes(self._number, batch))
        self._number += 1

    def step_failed(self, error: BaseException) -> NoReturn:
        """Ends all hosts: a lost store cannot be made again on all of them in step."""
        self._group.step_failed(error)

    def done(self) -> None:
        """Lets the followers go."""
        self._group.tell(Kind.DONE)


def follow(built: AssembledEngine, group: HostGroup) -> None:
    """Does what the group's leader does, until it is done; a call that cannot be followed ends all hosts. `built` is
    made from the same flags as the leader's; its scheduler is not used."""
    loop, vocab_size = built.engine.loop, built.engine.vocab_size
    receiver = Receiver(loop.batches.warm_up_batches(vocab_size))
    group.tell(Kind.READY, built.digest.encode())
    before: Any = None
    for expected, message in enumerate(group.calls()):
        try:
            number, batch = receiver.from_bytes(message)
        except WireError as error:
            group.end(f"host {group.host} cannot follow call {expected} of host 0: {error}")
        if number != expected:
            group.end(f"host {group.host} received call {number} of host 0, expected {expected}")
        try:
            output = loop.run(batch)
            if output is not None:  # as the leader: one step ahead of what is known to have worked
                jax.block_until_ready(before)
                before = output
        except Exception as error:
            group.step_failed(error)
