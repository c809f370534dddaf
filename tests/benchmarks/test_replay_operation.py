"""The operations alone, one token and several: that it runs, and what it says."""

import json

import pytest

from benchmarks.replay_operation import main


@pytest.mark.slow
def test_it_runs(capsys):
    main(["demo", "--rows", "2", "--drafts", "1", "--turns", "2"])
    environment, line = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert environment["metric"] == "environment"
    assert list(line["ms"]) == ["update of 1", "replay of 1", "replay of 2"]
    assert len(line["times_update_of_1"]) == len(line["times_replay_of_1"]) == 2
