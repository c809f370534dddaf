"""The commands `convert`, `inspect` and `plan`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face or Orbax directory.")],
    target: Annotated[Path, typer.Argument(help="Directory to create.")],
    form: Annotated[str, typer.Option(help="orbax, or hugging-face (quantized: compressed-tensors).")] = "orbax",
    dtype: Annotated[str, typer.Option(help="Data type of the stored weights; auto keeps the checkpoint's.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="Quantize the weights: int8, fp8, int4 or nvfp4.")] = None,
    quantization_exclude: Annotated[
        list[str] | None, typer.Option(help="Module not to quantize, by name with wildcards; repeatable.")
    ] = None,
) -> None:
    """Convert a Hugging Face checkpoint to a sharded Orbax checkpoint, or to one with quantized weights."""
    import checkpoints

    options: dict[str, Any] = {"form": form, "dtype": dtype, "quantization": quantization}
    checkpoints.convert(source, target, quantization_exclude=quantization_exclude or (), **options)
    typer.echo(f"{source} -> {target}", err=True)


def inspect(
    model: Annotated[str, typer.Option(help="Directory, 'demo', a published model size, or a hub's name.")] = "demo",
    page_size: Annotated[int, typer.Option(help="Tokens per page.", min=1, max=65_536)] = 32,
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
    from checkpoints.load import Checkpoint
    from checkpoints.resolve import local
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


if TYPE_CHECKING:
    from serving.capacity.plan import CapacityPlan


@with_options(Options("flags", EngineConfig, "Engine"), config_file=True)
def plan(
    topology: Annotated[
        str,
        typer.Option(help="TPU slice such as v5e-8, GPUs such as h100-4, or all (the smallest machine of each kind)."),
    ] = "all",
    *,
    at_context: Annotated[
        int | None, typer.Option(help="Also show how many sequences of this many tokens run at once.", min=1)
    ] = None,
    list_models: Annotated[bool, typer.Option("--list-models", help="List the names of published models.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Compile every program, not only the largest ones.")] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Estimate by arithmetic, without compiling.")] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens of context in decode steps. Unset: --at-context, or 2048.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    flags: dict[str, Any],
) -> None:
    """Compile and size a model for another machine. Needs no weights and no accelerator."""
    import jax
    from rich.console import Console

    from checkpoints import load_config
    from checkpoints.presets import PRESETS
    from serving.capacity.plan import make_plan
    from serving.capacity.report import as_comparison, as_text
    from serving.capacity.report import as_json as plain
    from serving.capacity.targets import target
    from serving.engine.assembly.fetch import resolved_model

    # Do not touch this machine's accelerators: another process may be using them.
    jax.config.update("jax_platforms", "cpu")
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    if list_models:
        for name, preset in PRESETS.items():
            typer.echo(f"{name:30} {preset.parameters / 1e9:7.2f} billion parameters")
        return
    machine = None if topology == "all" else target(topology)
    if (replicas := flags.get("data_parallel_size") or 1) > 1:
        raise ConfigError(f"data_parallel_size {replicas}: a plan is for one replica; give its devices as --topology")
    context = context or at_context
    config, notice = resolved_model(EngineConfig.create(**(flags | {"tensor_parallel_size": 1})))
    if notice:
        errors.print(f"note: {notice}", markup=False, style="yellow")
    model = load_config(config.model, hf_overrides=config.hf_overrides)
    longest = config.max_model_len or model.max_position_embeddings
    if at_context is not None and longest and at_context > longest:
        raise ConfigError(f"--at-context {at_context}: a sequence has at most {longest} tokens (--max-model-len)")
    if machine is None:
        if full or "tensor_parallel_size" in flags:
            raise ConfigError("--topology all: --full and --tensor-parallel-size need one machine")
        with errors.status("planning"):
            plans, failures = smallest_machines(config, context)
        report = {"fits": {made.target.name: plain(made, at_context) for made in plans}, "does_not_fit": failures}
        text, fits = as_comparison(plans, failures, at_context), bool(plans)
    else:
        members = config.context_parallel_size
        shards = machine.count // members
        if flags.get("tensor_parallel_size") not in (None, shards):
            of_members = f"context_parallel_size {members} with " if members > 1 else ""
            raise ConfigError(
                f"{of_members}tensor_parallel_size {flags['tensor_parallel_size']}: {topology} has {machine.count} "
                "device(s), and a plan uses all of them"
            )
        with errors.status("planning") as status:
            made = make_plan(
                config, machine, compile=not analysis, full=full, context=context,
                progress=lambda text: status.update(text),
            )  # fmt: skip
        report, text, fits = plain(made, at_context), as_text(made, at_context), made.fits
    if as_json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        out.print(text)
    if not fits:
        raise typer.Exit(1)


def smallest_machines(config: EngineConfig, context: int | None) -> tuple[list[CapacityPlan], dict[str, str]]:
    """Returns the plan for the smallest machine of each kind that fits the model, and a reason for each kind without
    one."""
    from serving.capacity.plan import make_plan
    from serving.capacity.targets import families

    plans: list[CapacityPlan] = []
    failures: dict[str, str] = {}
    for machines in families():
        why = ""
        for machine in machines:
            try:
                made = make_plan(config, machine, compile=False, context=context)
            except ConfigError as error:
                why = str(error)
                continue
            if made.fits:
                plans.append(made)
                break
            why = f"{machine.name}: does not fit"
        else:
            failures[machines[0].device.name] = why
    return plans, failures
