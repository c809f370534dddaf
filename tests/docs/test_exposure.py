"""docs/exposure.md states each bound as the code has it."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from serving.api.http.settings import _DEFAULTS, ServerSettings
from serving.config import EngineConfig
from serving.hosts.settings import HostSettings
from serving.split.settings import RouterSettings, SplitSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "exposure.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
SETTINGS = (ServerSettings, RouterSettings, SplitSettings, HostSettings, EngineConfig)
DEFAULTS = {name: field.default for kind in SETTINGS for name, field in kind.model_fields.items()} | _DEFAULTS
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "h": 3600}
BOUNDS = {
    "levels of arrays": "serving.api.http.json_values: MAX_DEPTH",
    "values of log-probabilities": "serving.api.http.generation: MAX_VALUES",
    "bytes of routed experts": "serving.api.http.generation: MAX_EXPERT_BYTES",
    "stop strings": "serving.engine.requests.sampling_params: MAX_STOP_CHARACTERS MAX_STOP_IDS",
    "`n` of a prompt": "serving.engine.requests.sampling_params: MAX_CHOICES",
    "entries of `logit_bias`": "mamba_jax.sampling.table: MAX_LOGIT_BIAS MAX_PROMPT_LOGPROB_IDS",
    "marks of a request": "serving.core.cache.retention: MAX_MARKS LONGEST_TTL",
    "conversations that are": "serving.engine.requests.conversations: _CLIENTS _CONVERSATIONS _MESSAGES",
    "texts of a key": "serving.api.http.text: _THREADS",
    "time for which a key keeps": "serving.core.cache.eviction_queue: ABSENT_SECONDS",
    "CPU time of a first trial": "serving.engine.structured.trials: QUICK_SECONDS",
    "CPU time of one mask in a trial": "serving.engine.structured.grammar_trial: MASK_SECONDS",
    "grammars that wait": "serving.engine.structured.trials: _WAITING _WAITING_OF_CLIENT",
    "characters of a grammar": "serving.engine.structured.grammar_trial: LONGEST",
    "calls in an answer": "serving.api.http.parsing.grammars: MOST_CALLS _MOST",
    "names of adapters": "serving.api.http.endpoints.updates: MAX_ADAPTERS",
    "time to read an adapter": "serving.engine.requests.adapter_reads: READ_SECONDS",
    "adapters that are read": "serving.engine.requests.adapter_reads: MAX_READS MAX_THREADS",
    "bytes of a JSON file": "checkpoints.json_file: MOST_JSON",
    "time to read new weights": "serving.engine.async_engine: READ_WEIGHTS_SECONDS",
    "states that requests to a decode worker": "serving.split.decode_side: MAX_EXPECTED",
    "prefill workers that a decode": "serving.split.http.routes: _MAX_PEERS",
    "routers that follow": "serving.split.http.events: MOST_READERS",
    "states that a router takes": "serving.split.router.event_followers: MOST_STATES _LONGEST",
    "bytes of a message between hosts": "serving.hosts.link: MAX_FRAME",
}


def numbers(cell):
    """The numbers of a cell, in bytes, seconds or pieces."""
    found = re.findall(r"([0-9][0-9,]*(?:\.[0-9]+)?)(?: (KiB|MiB|GiB|h)\b)?", cell)
    return {float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found}


@pytest.mark.parametrize("begin", BOUNDS)
def test_bounds_are_those_of_the_code(begin):
    (row,) = [row for row in ROWS if row[0].startswith(begin)]
    module, _, names = BOUNDS[begin].partition(":")
    assert {getattr(import_module(module), name) for name in names.split()} <= numbers(row[1]), row


@pytest.mark.parametrize("row", [row for row in ROWS if "--" in "".join(row[2:3])], ids=lambda row: row[0][:40])
def test_defaults_of_flags_are_stated(row):
    for flag in re.findall(r"`--([a-z-]+)`", row[2].partition(";")[0]):
        default = DEFAULTS[flag.replace("-", "_")]
        assert default is None or default in numbers(row[1]), (flag, default, row[1])


def test_every_flag_that_bounds_something_is_there():
    servers = {name for kind in SETTINGS[:-1] for name in kind.model_fields}
    bounds = {name for name in servers if name.startswith("max_") or name.endswith(("_timeout", "_bytes"))}
    assert not {name for name in bounds if f"--{name.replace('_', '-')}`" not in PAGE}
