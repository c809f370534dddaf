"""The commands `convert` and `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face or Orbax directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    form: Annotated[
        str,
        typer.Option(help="orbax, or hugging-face (quantized weights in compressed-tensors format)."),
    ] = "orbax",
    dtype: Annotated[str, typer.Option(help="Data type of the stored weights; auto keeps the checkpoint's.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantize the weights: int8, fp8, int4 or nvfp4.")] = None,
    quantization_exclude: Annotated[
        list[str] | None, typer.Option(help="Module not to quantize, by name with wildcards; repeatable.")
    ] = None,
) -> None:
    """Convert a Hugging Face checkpoint to a sharded Orbax checkpoint, or to one with quantized weights."""
    import checkpoints

    exclude = quantization_exclude or ()
    checkpoints.convert(
        source,
        target,
        form=form,  # type: ignore[arg-type]
        dtype=dtype,
        quantization=quantization,
        quantization_exclude=exclude,
    )
    typer.echo(f"{source} -> {target}", err=True)


def inspect(
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, 'demo', the name of a published model size, or a hub's name.")
    ] = "demo",
    page_size: Annotated[int, typer.Option(help="Tokens per page.")] = 32,
    *,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model from a hub.")] = None,
    hf_overrides: Annotated[str | None, typer.Option(help="JSON object of fields that replace config.json's.")] = None,
    adapter: Annotated[str | None, typer.Option(help="An adapter's directory: show which share it adapts.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the implementation of each operation.")] = False,
    platform: Annotated[str, typer.Option(help="Platform of --kernels: cpu, gpu or tpu.")] = "cpu",
) -> None:
    """Show a model's structure and the memory that its state takes, without loading weights."""
    import jax.numpy as jnp
    from rich.console import Console
    from rich.table import Table

    from checkpoints import load_config
    from checkpoints.hub import local
    from checkpoints.load import Checkpoint
    from mamba_jax import HybridModel
    from mamba_jax.store import StoreShape

    model = local(model, revision=revision, weights=False)
    config = load_config(model, hf_overrides=hf_overrides)
    shape = StoreShape.of(config)
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows: dict[str, Any] = {
        "family": config.family,
        "parameters": f"{HybridModel.abstract(config).num_parameters:,}",
        "quantized weights": Checkpoint(model, hf_overrides=hf_overrides).quantized_as() or "none",
        "layers": config.pattern,
        "hidden size, vocabulary": f"{config.hidden_size:,}, {config.vocab_size:,}",
        "longest sequence": f"{config.max_position_embeddings:,}" if config.max_position_embeddings else "no limit",
        "draft layer": config.mtp_pattern or "none",
    }
    for dtype in ("float32", "bfloat16"):
        slot, page = shape.bytes_per_slot(jnp.dtype(dtype)), shape.bytes_per_page(page_size, jnp.dtype(dtype))
        rows[f"state of a sequence, {dtype}"] = f"{slot:,} bytes (recurrent states in float32)"
        rows[f"page of {page_size} tokens, {dtype}"] = f"{page:,} bytes" if page else "none: no attention"
    if adapter is not None:
        from checkpoints.adapters.adapter import read_adapter
        from mamba_jax.adapters import targets

        found, abstract = read_adapter(adapter, config), HybridModel.abstract(config)
        dense = targets(abstract)
        layers = dense if found.layers.keys() <= dense.keys() else targets(abstract, experts=True)
        sizes = {path: target.size for path, target in layers.items()}
        share = sum(sizes[path] for path in found.layers) / sum(sizes.values())
        rows["adapter"] = f"rank {found.rank}, {found.num_parameters:,} parameters"
        if found.initial_state is not None:
            rows["initial state"] = (
                f"{len(found.initial_state.layers)} of {config.num_recurrent_layers} recurrent layers"
            )
        rows["adapted dense layers"] = f"{len(found.layers)} of {len(layers)} ({share:.1%} of their parameters)"
    if kernels:
        from mamba_jax.kernel_check.calls import kernel_report

        if platform not in ("cpu", "gpu", "tpu"):
            raise typer.BadParameter(f"--platform must be cpu, gpu or tpu, got {platform!r}")
        for phase, operation, name, why in kernel_report(config, platform):
            rows[f"{phase}: {operation}"] = f"{name} ({why})" if why else name
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console(soft_wrap=True, highlight=False).print(table)
