"""docs/exposure.md states each bound as the code has it."""

import re
from pathlib import Path

import pytest

from checkpoints.json_file import MOST_JSON
from mamba_jax.sampling import table
from serving.api.http.endpoints.updates import MAX_ADAPTERS
from serving.api.http.generation import MAX_VALUES
from serving.api.http.json_values import MAX_DEPTH
from serving.api.http.parsing.grammars import MOST_CALLS
from serving.api.http.protocol.common import MAX_STOP_TEXTS
from serving.api.http.settings import _DEFAULTS, ServerSettings
from serving.config import EngineConfig
from serving.core.cache.retention import LONGEST_TTL, MAX_MARKS
from serving.engine.async_engine import READ_WEIGHTS_SECONDS
from serving.engine.requests import adapter_reads, sampling_params
from serving.engine.structured import grammar_trial, trials
from serving.hosts.link import MAX_FRAME
from serving.hosts.settings import HostSettings
from serving.split.decode_side import MAX_EXPECTED
from serving.split.http.events import MOST_READERS
from serving.split.router.event_followers import MOST_STATES
from serving.split.settings import RouterSettings, SplitSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "exposure.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
SETTINGS = (ServerSettings, RouterSettings, SplitSettings, HostSettings, EngineConfig)
DEFAULTS = {name: field.default for kind in SETTINGS for name, field in kind.model_fields.items()} | _DEFAULTS
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "h": 3600}
BOUNDS = {
    "levels of arrays": MAX_DEPTH,
    "values of log-probabilities": MAX_VALUES,
    "stop strings": (MAX_STOP_TEXTS, sampling_params.MAX_STOP_CHARACTERS, sampling_params.MAX_STOP_IDS),
    "`n` of a prompt": sampling_params.MAX_CHOICES,
    "entries of `logit_bias`": (table.MAX_LOGIT_BIAS, table.MAX_PROMPT_LOGPROB_IDS),
    "marks of a request": (MAX_MARKS, LONGEST_TTL),
    "CPU time of a first trial": trials.QUICK_SECONDS,
    "CPU time of one mask in a trial": grammar_trial.MASK_SECONDS,
    "characters of a grammar": grammar_trial.LONGEST,
    "calls in an answer": MOST_CALLS,
    "names of adapters": MAX_ADAPTERS,
    "time to read an adapter": adapter_reads.READ_SECONDS,
    "adapters that are read": (adapter_reads.MAX_READS, adapter_reads.MAX_THREADS),
    "bytes of a JSON file": MOST_JSON,
    "time to read new weights": READ_WEIGHTS_SECONDS,
    "states that requests to a decode worker": MAX_EXPECTED,
    "routers that follow": MOST_READERS,
    "states that a router takes": MOST_STATES,
    "bytes of a message between hosts": MAX_FRAME,
}


def numbers(cell):
    """The numbers of a cell, in bytes, seconds or pieces."""
    found = re.findall(r"([0-9][0-9,]*(?:\.[0-9]+)?)(?: (KiB|MiB|GiB|h)\b)?", cell)
    return [float(number.replace(",", "").rstrip(".")) * UNITS.get(unit, 1) for number, unit in found]


@pytest.mark.parametrize("begin", BOUNDS)
def test_bounds_are_those_of_the_code(begin):
    (row,) = [row for row in ROWS if row[0].startswith(begin)]
    wanted = BOUNDS[begin] if isinstance(BOUNDS[begin], tuple) else (BOUNDS[begin],)
    assert set(wanted) <= {*numbers(row[1])}, row


@pytest.mark.parametrize("row", [row for row in ROWS if "--" in "".join(row[2:3])], ids=lambda row: row[0][:40])
def test_defaults_of_flags_are_stated(row):
    for flag in re.findall(r"`--([a-z-]+)`", row[2].partition(";")[0]):
        default = DEFAULTS[flag.replace("-", "_")]
        assert default is None or default in numbers(row[1]), (flag, default, row[1])


def test_every_flag_that_bounds_something_is_there():
    servers = {name for kind in SETTINGS[:-1] for name in kind.model_fields}
    bounds = {name for name in servers if name.startswith("max_") or name.endswith(("_timeout", "_bytes"))}
    missing = {name for name in bounds if f"--{name.replace('_', '-')}`" not in PAGE}
    assert not missing
