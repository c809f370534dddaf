"""A plan as text, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serving.capacity.plan import CapacityPlan
from serving.engine.assembly.free_memory import GIB, show_bytes


def as_json(plan: CapacityPlan, at_context: int | None = None) -> dict[str, Any]:
    """Everything, as plain values. `at_context` adds the number of sequences of that many tokens."""
    fields = dataclasses.asdict(plan)
    if at_context is not None:
        sequences, limit = plan.sequences_at(at_context)
        fields["at_context"] = {"tokens": at_context, "sequences": sequences, "limited_by": limit}
    fields["compiled"] = plan.compiled
    if plan.size is not None:
        fields["size"] |= {"tokens_in_pages": plan.size.tokens_in_pages, "slots_for_reuse": plan.size.slots_for_reuse}
    return fields


def verdict(plan: CapacityPlan) -> str:
    """The answer in one line."""
    each = "" if plan.target.count == 1 else " on each device"
    where = f"{plan.model} on {plan.target.name}"
    if plan.fits:
        return f"{where}: fits, {show_bytes(plan.spare)} to spare{each}"
    if plan.spare < 0:
        return f"{where}: does not fit, {show_bytes(-plan.spare)} too little{each}"
    return f"{where}: does not fit, the compiler refuses a program"


def as_text(plan: CapacityPlan, at_context: int | None = None) -> RenderableType:
    """The report for a terminal. `at_context` adds the number of sequences of that many tokens."""
    parts: list[RenderableType] = [Text(verdict(plan), style="bold green" if plan.fits else "bold red"), _machine(plan)]
    parts += [Text(), _memory(plan)]
    if plan.size is not None:
        parts += [Text(), Text(plan.size.report())]
        parts.append(Text(f"  off the device: {show_bytes(plan.bytes_off_device)} a state, without keys and values"))
        tokens = at_context or plan.context
        sequences, limit = plan.sequences_at(tokens)
        parts.append(Text(f"At {tokens:,} tokens each, {sequences:,} sequences run at once (limited by {limit})."))
    if plan.steps:
        parts += [Text(), _steps(plan)]
    if plan.long_contexts:
        parts += [Text(), _long_contexts([plan])]
    if plan.programs:
        parts += [Text(), _programs(plan), Text(plan.kernels, style="dim")]
    parts += [Text(f"note: {note}", style="yellow") for note in plan.notes]
    if not plan.compiled and plan.size is not None:
        parts.append(Text("By arithmetic only: nothing was compiled, and temporaries are a rough upper bound."))
    return Group(*parts)


def as_comparison(plans: list[CapacityPlan], failures: dict[str, str], at_context: int | None) -> RenderableType:
    """The smallest machine of each kind that holds the model, and why the others do not."""
    columns = ["machine", "devices", "memory", "to spare each"] + (["sequences at once"] if at_context else [])
    cells = []
    for plan in sorted(plans, key=lambda plan: plan.target.count * plan.target.device.memory):
        memory = plan.target.count * plan.target.device.memory
        row = [plan.target.name, f"{plan.target.count}", show_bytes(memory), show_bytes(plan.spare)]
        cells.append(row + ([f"{plan.sequences_at(at_context)[0]:,}"] if at_context else []))
    tables = [_table("Smallest machine of each kind, by arithmetic", columns, cells)]
    if any(plan.long_contexts for plan in plans):
        tables.append(_long_contexts(plans))
    return Group(*tables, *(Text(f"{name}: {why}", style="dim") for name, why in failures.items()))


def _machine(plan: CapacityPlan) -> Text:
    device = plan.target.device
    figures = f"{device.memory / GIB:.2f} GiB, {device.bandwidth / 1e9:,.0f} GB/s, {device.flops / 1e12:,.0f} TFLOP/s"
    divided = "" if plan.target.count == 1 else ", every layer divided over all of them"
    if plan.members > 1:
        divided = f", keys and values divided over {plan.members} members, every layer over the devices of each"
    model = f"{plan.parameters / 1e9:.2f} billion parameters in {plan.dtype}"
    return Text(f"{model}; {plan.target.count} x {device.name} ({figures}){divided}")


def _memory(plan: CapacityPlan) -> Table:
    compiled = f"{len(plan.programs)} of {plan.num_programs} compiled" if plan.programs else ""
    store = "states and pages" if plan.size is not None else "states and pages of one sequence"
    rows = [
        ("weights", plan.weights),
        (store, plan.store),
        (f"programs ({compiled or 'estimate'})", plan.code),
        ("temporaries" + ("" if plan.programs else " (upper bound)"), plan.temporaries),
        ("seats and adapters", plan.other),
        ("left" if plan.spare >= 0 else "missing", plan.spare),
    ]
    shown = [row for row in rows if row[1] or row is rows[-1]]
    cells = [(name, show_bytes(count), f"{count / plan.limit:.1%}") for name, count in shown]
    return _table("Memory of one device", ("", "size", "of the limit"), cells)


def _steps(plan: CapacityPlan) -> Table:
    title = (
        "Steps at published speeds: no step can be faster (decode of the rows that fit at "
        f"{plan.context:,} tokens of context)"
    )
    columns = ("", "memory", "GFLOP", "at least", "memory ms", "compute ms", "at most")
    cells = [
        (step.name, show_bytes(step.work.bytes), f"{step.work.flops / 1e9:,.0f}", f"{step.bound_ms:.2f} ms",
         f"{step.memory_ms:.2f}", f"{step.compute_ms:.2f}", f"{step.tokens_per_second:,.0f} tokens/s")
        for step in plan.steps
    ]  # fmt: skip
    return _table(title, columns, cells)


def _long_contexts(plans: Sequence[CapacityPlan]) -> Table:
    columns = (
        "machine", "tokens", "sequences at once", "memory of each", "first token after", "with steps of",
        "next token after",
    )  # fmt: skip
    title = "One sequence of a long context, at least (by arithmetic at published speeds; a prompt without a hit)"
    cells = [
        (plan.target.name, f"{each.tokens:,}", f"{each.sequences:,}", show_bytes(each.bytes),
         f"{each.first_token_s:,.1f} s",
         f"{each.chunk:,}: {each.chunked_first_token_s:,.1f} s" if each.chunked_first_token_s < each.first_token_s
         else "-", f"{each.decode_ms:.2f} ms")
        for plan in plans for each in plan.long_contexts
    ]  # fmt: skip
    return _table(title, columns, cells)


def _programs(plan: CapacityPlan) -> Table:
    title = f"Compiled for {plan.target.topology} in {plan.compile_seconds:.0f} s"
    cells = [
        (each.name, *map(show_bytes, (each.code, each.temporaries, each.aliased)), f"{each.seconds:.0f} s")
        for each in plan.programs
    ]
    return _table(title, ("", "program", "temporaries", "updated in place", "compile time"), cells)


def _table(title: str, columns: Sequence[str], cells: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    for row in cells:
        table.add_row(*row)
    return table
