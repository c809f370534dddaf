"""The training loop: data-parallel over all devices, and resumable with bitwise equal results on a CPU."""

import functools
import importlib.util
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import weight_of
from mamba_jax.train.config import TrainConfig
from mamba_jax.train.data import Batches, DocumentBounds
from mamba_jax.train.loss import Parameters, Validation, refuse_untrainable, training_loss
from mamba_jax.train.optimizer import learning_rate, make_optimizer
from mamba_jax.train.recipe import CHECKPOINTS, TrainState, open_checkpoints, restore_state, save_state

LOG = "log.jsonl"
Record = dict[str, float]


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is not finite; the last good state is on disk."""


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    values: Parameters
    """All weights; trained ones are float32."""
    steps: int
    finished: bool
    """False if it was interrupted; it can be resumed."""


def initial_values(config: HybridConfig, seed: int) -> Parameters:
    """Random float32 initial weights."""
    model = HybridModel(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    return {path: leaf.get_value() for path, leaf in parameters(model).items()}


def initial_state(
    values: Parameters, optimizer: optax.GradientTransformation, place: Callable[[Any], NamedSharding]
) -> TrainState:
    """Returns the state before the first step: copies of the weights, because each step donates its state.

    Args:
        values: the trained weights.
        optimizer: whose moments are added.
        place: the sharding of an array by its shape.
    """
    weights = {path: jax.device_put(jnp.array(v, jnp.float32, copy=True), place(v)) for path, v in values.items()}
    placements = jax.tree.map(place, jax.eval_shape(optimizer.init, weights))
    moments = jax.jit(optimizer.init, out_shardings=placements)(weights)
    step = jnp.zeros((), jnp.int32)
    return TrainState(jax.device_put(step, place(step)), weights, moments)


def _placement(mesh: Mesh, array: Any, *, divided: bool) -> NamedSharding:
    """The sharding of weights and moments: if `divided`, by the largest axis that the devices can divide equally."""
    axes = [n for n, size in enumerate(array.shape) if divided and size % mesh.size == 0]
    largest = max(axes, key=lambda n: array.shape[n], default=None)
    spec = () if largest is None else (*[None] * largest, *mesh.axis_names)
    return NamedSharding(mesh, PartitionSpec(*spec))


def refuse_quantized(values: Mapping[str, Any]) -> None:
    """Raises ModelConfigError if parameters include quantized weights, which cannot be trained."""
    if found := sorted({weight for path in values if (weight := weight_of(path))}):
        raise ModelConfigError(
            f"{len(found)} weights are quantized ({found[0]}, ...): training needs the wide checkpoint they are from"
        )


def check_run(settings: TrainConfig, config: HybridConfig, devices: int | None = None) -> None:
    """Checks settings before a run prepares its data.

    Args:
        devices: number of devices that share each batch; None: all.
    Raises:
        ModelConfigError: the settings do not fit each other, the model or the devices.
    """
    devices = jax.device_count() if devices is None else devices
    refuse_untrainable(config, settings.drafts, separate=settings.data.separate_documents)
    learning_rate(settings.optimizer, settings.steps)
    part = settings.batch_size // settings.accumulate // settings.drafts.every
    if part % devices:
        raise ModelConfigError(
            f"batch_size / accumulate / drafts.every is {part}: it cannot be divided among {devices} devices"
        )


def train(
    settings: TrainConfig,
    config: HybridConfig,
    batches: Batches,
    directory: Path,
    *,
    values: Parameters | None = None,
    trained: Callable[[str], bool] = lambda path: True,
    model_weight: float = 1.0,
    validation: Int32[np.ndarray, "windows length"] | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Trains until `settings.steps`, or until interrupted (SIGINT or SIGTERM), from the newest state in `directory`.

    Args:
        settings: the run's settings.
        config: the model's configuration.
        batches: sequences, one token longer than `settings.sequence_length`, by step.
        directory: contains the checkpoints (`checkpoints/`) and the log (`log.jsonl`).
        values: initial weights; random ones if None.
        trained: predicate on dotted paths that selects the trained weights; the others do not change.
        model_weight: see `training_loss`.
        validation: sequences of the same length, whose loss is computed every `settings.validate_every` steps and
            after the last.
        devices: devices that share each batch; all if None.
        progress: called with each record of the log.
    Raises:
        ModelConfigError: the settings do not fit each other, the machine, the data, or the run on disk; or weights are
            quantized.
        TrainingDiverged: the loss or its gradient is not finite. The state before that step is saved.
    """
    refuse_quantized(values or {})
    mesh = Mesh(np.array(devices or jax.devices()), ("batch",))
    check_run(settings, config, mesh.size)
    part = settings.batch_size // settings.accumulate
    by_sequence, by_part = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("batch",), (None, "batch")))
    optimizer = make_optimizer(settings.optimizer, settings.steps)
    start = values if values is not None else initial_values(config, settings.seed)
    place = functools.partial(_placement, mesh, divided=settings.shard_weights)
    state = initial_state({path: v for path, v in start.items() if trained(path)}, optimizer, place)
    frozen = {path: jax.device_put(v, place(v)) for path, v in start.items() if not trained(path)}
    loss = functools.partial(
        training_loss, config=config, drafts=settings.drafts, dtype=jnp.dtype(settings.compute_dtype),
        model_weight=model_weight, rematerialize=settings.rematerialize, balance_experts=settings.balance_experts,
    )  # fmt: skip
    validate = None if validation is None else Validation(
        validation, batch_size=settings.batch_size, config=config, dtype=jnp.dtype(settings.compute_dtype),
        sharding=by_sequence, devices=mesh.size,
    )  # fmt: skip
    placements = jax.tree.map(lambda x: x.sharding, state)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="bounds", out_shardings=(placements, None))
    def update(
        state: TrainState, frozen: Parameters, tokens: jax.Array, step: jax.Array, bounds: DocumentBounds | None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def of(values: Parameters, tokens: jax.Array) -> Any:
            return loss({**frozen, **values}, tokens, bounds=bounds)

        (total, parts), gradient = _mean_over_parts(jax.value_and_grad(of, has_aux=True), state.values, tokens)
        changes, moments = optimizer.update(gradient, state.optimizer, state.values)
        values = optax.apply_updates(state.values, changes)
        parts["gradient_norm"] = optax.global_norm(gradient)
        # A step that is not finite changes nothing, and neither do later steps, because their number is not the next
        # one. The state therefore stays the last good one until the host checks it.
        good = jnp.isfinite(total) & jnp.isfinite(parts["gradient_norm"]) & (state.step == step)
        changed = TrainState(state.step + 1, values, moments)
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), changed, state), parts

    directory.mkdir(parents=True, exist_ok=True)
    with open_checkpoints(directory / CHECKPOINTS) as checkpoints:
        if checkpoints.latest_step() is not None:
            state = restore_state(checkpoints, state)
        log = _Log(directory / LOG, settings, after=int(state.step), progress=progress)
        with _interruptible() as interrupted:
            step = int(state.step)
            while step < settings.steps and not interrupted():
                batch = batches[step].reshape(settings.accumulate, part, -1)
                if (largest := np.maximum(batch, ~batch).max()) >= config.vocab_size:
                    raise ModelConfigError(
                        f"the data has the token {largest}, but the model a vocabulary of {config.vocab_size}: prepare "
                        "the data with the model's tokenizer"
                    )
                tokens = jax.device_put(batch, by_part)
                state, parts = update(state, frozen, tokens, jnp.int32(step), bounds=DocumentBounds.of(batch))
                step += 1
                save = step % settings.save_every == 0 or step == settings.steps or interrupted()
                due = validate is not None and (step % settings.validate_every == 0 or step == settings.steps)
                if save or due or log.is_due(step):
                    _stop_if_diverged(state, step, checkpoints)
                if validate is not None and due:
                    parts["validation_loss"] = validate.loss({**frozen, **state.values})
                if due or log.is_due(step):
                    log.add(step, parts)
                if save:
                    save_state(checkpoints, state)
        return Run({**frozen, **state.values}, step, finished=step >= settings.steps)


def _mean_over_parts(function: Callable[..., Any], values: Parameters, parts: jax.Array) -> Any:
    """Returns the mean of `function(values, part)` over the first axis of `parts`, one part after the other.

    Parts are weighted by their number of targets, so that the mean is that of the whole batch.

    This is not `optax.MultiSteps`, because a step of the run, its record and its learning rate are of a whole batch.
    """
    if len(parts) == 1:
        return function(values, parts[0])
    targets = (parts[..., 1:] >= 0).sum((1, 2))
    shares = targets / jnp.maximum(targets.sum(), 1)

    def add(total: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        tokens, share = part
        return jax.tree.map(lambda sum, x: sum + share * x, total, function(values, tokens)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, values, parts[0]))
    return jax.lax.scan(add, zeros, (parts, shares))[0]


def _stop_if_diverged(state: TrainState, step: int, checkpoints: ocp.CheckpointManager) -> None:
    """Raises TrainingDiverged unless all steps so far are finite; first saves the state before the wrong one."""
    good = int(state.step)  # waits for the step
    if good == step:
        return
    if checkpoints.latest_step() != good:
        save_state(checkpoints, state)
    raise TrainingDiverged(
        f"the loss or its gradient is not finite at step {good + 1}; the state after {good} steps is saved;"
        " use a lower optimizer.learning_rate, more optimizer.warmup_steps or compute_dtype float32"
    )


def read_log(path: Path) -> list[Record]:
    """Returns the records of a run, in order; none if there is no log."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # the line that was being written when the run was killed
            break
    return records


class _Log:
    """Writes records as JSON lines. Removes entries after the checkpoint from which a run continues."""

    def __init__(self, path: Path, settings: TrainConfig, *, after: int, progress: Callable[[Record], None]) -> None:
        kept = [record for record in read_log(path) if record["step"] <= after]
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._path, self._settings, self._progress = path, settings, progress
        self._rate = learning_rate(settings.optimizer, settings.steps)
        self._seconds, self._then = (kept[-1]["seconds"] if kept else 0.0), time.monotonic()

    def is_due(self, step: int) -> bool:
        """Returns whether this step has a record even without a validation loss."""
        return step % self._settings.log_every == 0 or step == self._settings.steps

    def add(self, step: int, parts: Mapping[str, jax.Array | float]) -> None:
        record = {"step": step} | {name: float(value) for name, value in parts.items()}  # waits for the step
        now = time.monotonic()
        self._seconds, self._then = self._seconds + now - self._then, now
        tokens = step * self._settings.batch_size * self._settings.sequence_length
        record |= {"learning_rate": float(self._rate(step - 1)), "tokens": tokens, "seconds": round(self._seconds, 1)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._progress(record)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM only set a flag in this context, so that the current step can be finished and saved."""
    seen: list[int] = []
    try:
        old = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # only the main thread may set signal handlers
        old = {}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def plot_losses(records: Sequence[dict[str, float]], path: Path) -> bool:
    """Draws the losses of a run (nats per token, over tokens). Needs the extra `plots`.

    Returns:
        Whether it was drawn: False without matplotlib, or without records.
    """
    if importlib.util.find_spec("matplotlib") is None or not records:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = {"loss": "next token", "validation_loss": "next token, validation"}
    for name in sorted({name for r in records for name in r if name in labels or name.startswith("draft_loss_")}):
        label = labels.get(name) or f"draft {name.removeprefix('draft_loss_')}"
        shown = [r for r in records if name in r]
        axes.plot([r["tokens"] / 1e6 for r in shown], [r[name] for r in shown], label=label, linewidth=1)
    axes.set(xlabel="tokens, millions", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
    return True
