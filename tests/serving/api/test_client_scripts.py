"""Client scripts of benchmarks/clients that need nothing but the test extra, and an agent framework if it is there."""

import importlib
import itertools
import json
from pathlib import Path

import pytest

from benchmarks.clients import agent_loop


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("vendor", "part"), [("openai", "a conversation that the server kept"), ("anthropic", "called      look({'deep':")]
)
def test_the_sdks(server, capsys, vendor, part):
    pytest.importorskip(vendor, reason=f"needs the {vendor} SDK (the extra `test`)")
    script = importlib.import_module(f"benchmarks.clients.{vendor}_sdk")
    assert script.main(["--url", server.url]) == 0
    said = capsys.readouterr().out
    assert all(each in said for each in ("came from the cache", part, "refused"))


def shape(message):
    """A message without the texts that another build of the model may word otherwise, and without generated names."""
    calls = [
        (call["type"], call["function"]["name"], sorted(json.loads(call["function"]["arguments"])))
        for call in message.get("tool_calls", ())
    ]
    return message["role"], sorted(message), calls


@pytest.mark.full
def test_an_agents_loop_is_as_it_was_recorded(server, tmp_path, capsys):
    file = tmp_path / "loop.json"
    assert agent_loop.main(["--url", server.url, "--record", str(file)]) == 0
    assert capsys.readouterr().out.count("add({") == 3
    recorded = json.loads(Path(agent_loop.__file__).with_suffix(".json").read_text())
    now = json.loads(file.read_text())
    assert now["tools"] == recorded["tools"]
    assert [*map(shape, now["messages"])] == [*map(shape, recorded["messages"])]
    for record in (recorded, now):
        calls, results = record["messages"][1:-1:2], record["messages"][2:-1:2]
        for call, result in zip(calls, results, strict=True):
            (made,) = call["tool_calls"]
            assert result["tool_call_id"] == made["id"]
            assert result["content"] == agent_loop.run("add", made["function"]["arguments"])
        reasons = [turn["finish_reason"] for turn in record["turns"]]
        assert reasons == ["tool_calls"] * 3 + [reasons[-1]]
        assert reasons[-1] in ("stop", "length")
        used = [turn["usage"]["prompt_tokens"] for turn in record["turns"]]
        found = [turn["usage"]["prompt_tokens_details"]["cached_tokens"] for turn in record["turns"]]
        assert used == sorted(set(used))
        assert all(after >= before for before, after in itertools.pairwise(found[1:]))
        assert found[-1] > 0
    keys = [[sorted(turn), sorted(turn["usage"])] for turn in recorded["turns"]]
    assert keys == [[sorted(turn), sorted(turn["usage"])] for turn in now["turns"]]
