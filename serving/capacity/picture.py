"""A plan as a picture: one SVG file, no library needed."""

from __future__ import annotations

from html import escape

from serving.capacity.report import gib, memory_rows, verdict
from serving.capacity.result import CapacityPlan

_WIDTH, _LEFT, _BAR = 760, 20, 26
_COLOURS = ("#3b6ea5", "#e0993b", "#7a5195", "#b0b0b0", "#5fa777", "#e8e8e8")


def as_svg(plan: CapacityPlan) -> str:
    """The memory of one device as a bar, and under it the time that bounds each step."""
    parts = [_text(_LEFT, 28, verdict(plan), size=16, weight="bold")]
    device = plan.target.device
    how = "compiled for it" if plan.compiled else "by arithmetic only"
    parts.append(_text(_LEFT, 48, f"{plan.target.count} x {device.name}, {plan.dtype}, {how}"))
    parts += _memory(plan, 80)
    y = 80 + _BAR + 50 + 20 * len(memory_rows(plan))
    parts += _steps(plan, y)
    height = y + 30 + 44 * len(plan.steps)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _memory(plan: CapacityPlan, y: int) -> list[str]:
    rows = memory_rows(plan)
    used = sum(count for _, count in rows if count > 0)
    scale = (_WIDTH - 2 * _LEFT) / max(plan.limit, used)
    parts, x = [], float(_LEFT)
    for (_, count), colour in zip(rows, _COLOURS, strict=False):
        if count > 0:
            parts.append(_rect(x, y, count * scale, colour))
            x += count * scale
    limit = _LEFT + plan.limit * scale
    parts.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - 6}" y2="{y + _BAR + 6}" stroke="#b00" />')
    parts.append(_text(limit, y - 10, f"limit {gib(plan.limit)}", anchor="end"))
    for line, ((name, count), colour) in enumerate(zip(rows, _COLOURS, strict=False)):
        top = y + _BAR + 22 + 20 * line
        parts.append(f'<rect x="{_LEFT}" y="{top - 11}" width="12" height="12" fill="{colour}" />')
        parts.append(_text(_LEFT + 20, top, f"{name}: {gib(abs(count))}"))
    return parts


def _steps(plan: CapacityPlan, y: int) -> list[str]:
    if not plan.steps:
        return []
    parts = [_text(_LEFT, y, "Time of a step at published speeds: no step can be faster", weight="bold")]
    longest = max(step.bound_ms for step in plan.steps)
    scale = (_WIDTH - 2 * _LEFT) / longest
    for line, step in enumerate(plan.steps):
        top = y + 14 + 44 * line
        busy = max(step.memory_ms, step.compute_ms) * scale
        bound = "memory" if step.memory_ms >= step.compute_ms else "compute"
        parts.append(_rect(_LEFT, top + 16, busy, _COLOURS[0], height=14))
        parts.append(_rect(_LEFT + busy, top + 16, step.link_ms * scale, _COLOURS[1], height=14))
        label = f"{step.name}: {step.bound_ms:.2f} ms ({bound} {busy / scale:.2f}, links {step.link_ms:.2f})"
        parts.append(_text(_LEFT, top + 11, f"{label}, at most {step.tokens_per_second:,.0f} tokens/s"))
    return parts


def _rect(x: float, y: float, width: float, colour: str, *, height: int = _BAR) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}" />'


def _text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
