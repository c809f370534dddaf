"""The command `plan`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig

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
    full: Annotated[bool, typer.Option("--full", help="Compile every program, not only the two largest.")] = False,
    analysis: Annotated[bool, typer.Option("--analysis", help="Estimate by arithmetic, without compiling.")] = False,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of context to assume in decode steps. Unset: --at-context, or 2048.", min=1),
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
        if as_json:
            report = {made.target.name: plain(made, at_context) for made in plans}
            sys.stdout.write(json.dumps({"fits": report, "does_not_fit": failures}, indent=1) + "\n")
        else:
            out.print(as_comparison(plans, failures, at_context))
        if not plans:
            raise typer.Exit(1)
        return
    if flags.get("tensor_parallel_size") not in (None, machine.count):
        raise ConfigError(
            f"tensor_parallel_size {flags['tensor_parallel_size']}: {topology} has {machine.count} device(s), "
            "and a plan uses all of them"
        )
    config = config.model_copy(update={"tensor_parallel_size": machine.count})
    with errors.status("planning") as status:
        made = make_plan(
            config,
            machine,
            compile=not analysis,
            full=full,
            context=context,
            progress=lambda text: status.update(text),
        )
    if as_json:
        sys.stdout.write(json.dumps(plain(made, at_context), indent=1) + "\n")
    else:
        out.print(as_text(made, at_context))
    if not made.fits:
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
            sized = config.model_copy(update={"tensor_parallel_size": machine.count})
            try:
                made = make_plan(sized, machine, compile=False, context=context)
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
