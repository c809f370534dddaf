"""The loss curve as a picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path


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
