"""Generate the tables of engine.md and vllm.md: flags, combinations that are refused, models that are not supported.

python -m docs.flags
"""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mamba_jax.families import UNSUPPORTED
from serving.api.http.settings import ServerSettings
from serving.compatibility import RULES
from serving.config import EngineConfig
from serving.split.settings import SplitSettings
from serving.vllm.flags import FLAGS, Flag

DOCS = Path(__file__).resolve().parent
OWN = {
    f"--{name.replace('_', '-')}"
    for settings in (EngineConfig, ServerSettings, SplitSettings)
    for name in settings.model_fields
}
ALSO_VLLMS = (
    "--enable-lora", "--max-loras", "--max-lora-rank",
    "--allow-credentials", "--chat-template", "--config", "--default-chat-template-kwargs", "--download-dir",
    "--enable-chunked-prefill", "--enable-prefix-caching", "--hf-overrides", "--host", "--kv-events-config",
    "--mamba-cache-mode",
    "--max-logprobs", "--max-num-batched-tokens", "--max-num-seqs", "--model", "--otlp-traces-endpoint",
    "--override-generation-config", "--port", "--revision", "--root-path", "--seed", "--sse-keep-alive-interval",
    "--ssl-certfile", "--ssl-keyfile", "--tokenizer",
)  # fmt: skip
"""Flags of vLLM that have the same meaning here."""
OF_THE_COMMAND = {"--config"}


def table() -> str:
    """A Markdown table of the engine's flags."""
    lines = ["| Flag | Values | Default | Description |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        dashed = name.replace("_", "-")
        if field.annotation is bool or bool in get_args(field.annotation):
            flag, values = f"`--{dashed}`, `--no-{dashed}`", ""
        else:
            flag, values = f"`--{dashed}`", _values(field.annotation)
        default = "" if field.default is None else f"`{field.default}`".lower()
        lines.append(f"| {flag} | {values} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def _values(annotation: Any) -> str:
    union = get_origin(annotation) in (Union, types.UnionType)
    members = [m for m in (get_args(annotation) if union else (annotation,)) if m is not types.NoneType]
    (member,) = members
    if get_origin(member) is Literal:
        return " ".join(f"`{value}`" for value in get_args(member))
    return {int: "a number", float: "a number", str: "text", dict: "JSON"}[get_origin(member) or member]


def vllm_table() -> str:
    """A Markdown table of vLLM's flags and their support."""
    same = [flag for flag in ALSO_VLLMS if flag in OWN | OF_THE_COMMAND]
    rows = [f"| `{flag}` | same | |" for flag in same]
    rows += [_vllm_row(flag) for flag in FLAGS if flag.becomes is not None or flag.name not in OWN]
    return "\n".join(["| vLLM's flag | Support | Notes |", "|---|---|---|", *rows]) + "\n"


def _vllm_row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in (flag.name, *flag.short))
    if flag.unnecessary:
        return f"| {names} | unnecessary | {flag.unnecessary} |"
    if flag.missing:
        fine = f" ({' and '.join(flag.harmless)} is fine)" if flag.harmless else ""
        return f"| {names} | not supported | {flag.missing}{fine} |"
    ours = flag.ours if "`" in flag.ours else ", ".join(f"`{name}`" for name in flag.ours.split(", "))
    return f"| {names} | {'same, other values' if flag.ours == flag.name else 'alias'} | {ours} |"


def combinations() -> str:
    """A Markdown table of what excludes what."""
    rows = [f"| {rule.feature.text} | {rule.excludes.text} | {rule.advice} |" for rule in RULES]
    return "\n".join(["| Feature | Does not support | Instead |", "|---|---|---|", *rows]) + "\n"


def unsupported_models() -> str:
    """A Markdown table of recurrent models that are not supported."""
    rows = [f"| {name} | `{kind}` | {lacking} |" for kind, (name, lacking) in UNSUPPORTED.items()]
    return "\n".join(["| Models | `model_type` | Missing |", "|---|---|---|", *sorted(rows)]) + "\n"


TABLES = {
    "engine.md": {"flags": table, "combinations": combinations},
    "vllm.md": {"vllm": vllm_table, "models": unsupported_models},
}
"""For each page: the markers of its tables, and the functions that generate them."""


def with_table(name: str, page: str) -> str:
    """The page with the tables between their markers."""
    for mark, make in TABLES[name].items():
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
        text = begin + make() + end
        page = re.sub(f"{begin}.*{end}", lambda _, text=text: text, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    for name in TABLES:
        page = DOCS / name
        page.write_text(with_table(name, page.read_text(encoding="utf-8")), encoding="utf-8")
