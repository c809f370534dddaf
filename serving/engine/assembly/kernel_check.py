"""Finds out, at the first start on a machine, which kernels are wrong there: a child process runs them, not this one.

A verdict is kept for each (device, driver or libtpu, JAX, sources, model and flags), so that a second start reads one
file. A kernel that is wrong, hangs, crashes, does not compile or is slower than the plain form is not used: the
operation then has another kernel or its plain form. A kernel that could not be judged, for lack of memory or of the
device, is used, and nothing is kept. The device is described without JAX, because only one process can own a TPU: the
child ends before this process starts JAX.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO

from checkpoints.user_cache import cache_home
from serving.config import ConfigError, EngineConfig
from serving.state_transfer.identity import PROGRAM_PACKAGES, source_digest

log = logging.getLogger(__name__)

CHILD = (sys.executable, "-m", "serving.engine.assembly.kernel_check_child")
STARTING, RUNNING = 180.0, 60.0
"""Seconds of silence after which the child is killed: while it compiles, and while a kernel runs."""
CHECK_SECONDS = 600
"""That other hosts wait longer for one that checks kernels. How long a check takes on a TPU has not been measured."""
UNJUDGED = re.compile(
    r"MemoryError|RESOURCE_EXHAUSTED(?!.*(vmem|smem|shared memory))|UNAVAILABLE|CANCELLED|DEADLINE_EXCEEDED", re.I
)
"""Errors that say nothing of a kernel. The memory of a core, of fixed size, is its own business."""
_FLAGS = (
    "model", "load_format", "revision", "hf_overrides", "dtype", "quantization", "ssm_dtype", "kv_cache_dtype",
    "tile_size", "num_speculative_tokens", "replay_interval", "max_num_seqs",
    "context_parallel_size",
)  # fmt: skip


def checks_kernels(config: EngineConfig) -> bool:
    """Returns whether an engine with these flags checks its kernels, unless a verdict is kept."""
    if config.kernel_check == "off" or config.kernels == "xla" or config.schedule_invariant:
        return False
    return config.kernel_check == "always" or platform_at_hand() != "cpu" or "interpreted" in config.kernels


def refused_kernels(config: EngineConfig, *, command: Sequence[str] = CHILD) -> dict[tuple[str, str], str]:
    """Returns the kernels that are not to be used, as (operation, implementation), with the reasons.

    On a CPU, `kernel_check` auto checks only kernels that `kernels` names, in the interpreter. Call it before JAX is
    started.

    Raises:
        ConfigError: a kernel that `kernels` names did not pass.
    """
    if not checks_kernels(config):
        return {}
    platform = platform_at_hand()
    request = {name: getattr(config, name) for name in _FLAGS} | {"platform": platform}
    request |= {"page_size": config.page_size_on(platform), "excluded": config.excluded_from_quantization}
    path = cache_home() / "mamba-jax" / "kernels" / f"{_key(request)}.json"
    verdicts = None if config.kernel_check == "always" else _kept(path)
    if verdicts is None:
        log.info("checking kernels, once on this machine (kernel_check %s)", config.kernel_check)
        verdicts = run_child(command, request)
        if verdicts is None:
            log.warning("kernels could not be checked, and are used; run `mamba-jax check`, or use kernels=xla")
            return {}
        if unjudged := {name: why for name, why in verdicts.items() if UNJUDGED.search(why)}:
            log.warning("kernels could not be checked, and are used: %s", unjudged)
            verdicts = {name: why for name, why in verdicts.items() if name not in unjudged}
        else:
            _keep(path, verdicts)
    refused = {(name.split()[0], name.split()[1]): why for name, why in verdicts.items() if why}
    for (operation, kernel), why in refused.items():
        if kernel == config.kernels or f"{operation}={kernel}" in config.kernels.replace(" ", "").split(","):
            raise ConfigError(f"kernels names {kernel} for {operation}, which failed the check: {why}")
        log.warning("%s does not use %s, which failed the check: %s", operation, kernel, why)
    return refused


def run_child(
    command: Sequence[str],
    request: Mapping[str, object],
    *,
    starting: float = STARTING,
    running: float = RUNNING,
) -> dict[str, str] | None:
    """Runs the check in child processes. Returns why each kernel is not used, by "operation implementation", empty for
    one that passed; None if a child could not begin.

    A child prints `compile NAME` and `compiled NAME` around each compilation, `ready` after the last one, `run NAME`
    before each kernel and `done NAME WHY` after it, and `end`. A child that crashes or is silent for too long is
    killed. The kernel that ran or was compiled is the cause, and another child checks the rest. If several were
    compiled, the next child compiles one at a time.
    """
    verdicts: dict[str, str] = {}
    alone = False
    while True:
        told = json.dumps({**request, "skip": sorted(verdicts), "alone": alone})
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
        try:
            why, causes = _follow(child, told, verdicts, starting, running)
        finally:
            child.kill()
            child.wait()
        if why is None:
            return verdicts
        if not causes:
            log.warning("the check of kernels failed: %s", why)
            return None
        if len(causes) > 1 and not alone:
            alone = True
        else:
            verdicts |= dict.fromkeys(causes, why)


def _follow(
    child: subprocess.Popen[str], told: str, verdicts: dict[str, str], starting: float, running: float
) -> tuple[str | None, set[str]]:
    """Reads what a child says into `verdicts`. Returns why it failed, None if it did not, and the kernels under way."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(told)
        child.stdin.close()
    lines, limit, under_way = _lines(child.stdout), starting, Counter[str]()
    try:
        while (line := lines.get(timeout=limit)) is not None and line != "end":
            kind, _, rest = line.partition(" ")
            operation, kernel, *wrong = [*rest.split(" ", 2), ""]
            if kind == "ready":
                limit = running
            elif kind in ("compile", "run"):
                under_way[rest] += 1
            elif kind in ("compiled", "done"):
                under_way[f"{operation} {kernel}"] -= 1
            if kind == "done":
                verdicts[f"{operation} {kernel}"] = wrong[0]
        why = None if line == "end" else f"the process ended with code {child.wait(running)}"
    except (queue.Empty, subprocess.TimeoutExpired) as late:
        limit = running if isinstance(late, subprocess.TimeoutExpired) else limit
        why = f"it did not end within {limit:g} s"
    return why, set(+under_way)


def _lines(stream: IO[str]) -> queue.Queue[str | None]:
    """Lines as they come; None at the end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _environment() -> dict[str, str]:
    # A child must not take most of a GPU's memory: it is small, and this process may have some of it already.
    found = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if "," in found.get("TPU_WORKER_HOSTNAMES", ""):  # one chip: a slice of several hosts would wait for the others
        one = "1,1,1"
        found |= {"TPU_PROCESS_BOUNDS": one, "TPU_CHIPS_PER_PROCESS_BOUNDS": one, "TPU_VISIBLE_CHIPS": "0"}
    return found


def platform_at_hand() -> str:
    """The platform that JAX will choose, found without JAX."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    if asked:
        return {"cuda": "gpu", "rocm": "gpu"}.get(asked, asked)
    if os.path.exists("/proc/driver/nvidia/version") and importlib.util.find_spec("jax_plugins") is not None:
        return "gpu"
    if importlib.util.find_spec("libtpu") is not None and glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"):
        return "tpu"
    return "cpu"


def _key(request: Mapping[str, object]) -> str:
    """A digest of everything that a verdict depends on."""
    found = hashlib.sha256(json.dumps(request).encode())
    for part in (*_device(), *_versions(), source_digest(PROGRAM_PACKAGES)):
        found.update(part.encode())
    return found.hexdigest()[:24]


def _device() -> Iterator[str]:
    """What the system says of accelerators and their drivers."""
    for path in sorted(glob.glob("/proc/driver/nvidia/version") + glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError):
            lines = Path(path).read_text().splitlines()
            yield from (line for line in lines if line.startswith(("NVRM", "Model")))
    yield from (os.environ.get(name, "") for name in ("TPU_ACCELERATOR_TYPE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS"))
    for path in sorted(glob.glob("/sys/bus/pci/devices/*/vendor")):
        if Path(path).read_text().strip() == "0x1ae0":  # Google
            yield (Path(path).parent / "device").read_text()


def _versions() -> Iterator[str]:
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _kept(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and all(isinstance(why, str) for why in found.values()) else None


def _keep(path: Path, verdicts: Mapping[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(verdicts, indent=1))
        temporary.replace(path)
    except OSError as error:
        log.warning("the verdict on kernels is not kept: %s: %s", path, error.strerror)
