"""A whole engine with tiers, but for its programs: these emit one token for ever and leave the store as it is."""

import time
from types import SimpleNamespace

import pytest

from mamba_jax.model import parameters
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import assemble
from serving.tiers.folder import Folder
from tests.support.engines.engines import finish
from tests.support.engines.small_tiers import DISK, HOST, PARAMS, SMALL, ask, fill, tier_mover, tiers
from tests.support.engines.step_programs import NoPrograms
from tests.support.fleets.split_pair import model, tokens
from tests.support.waiting import comes_true


def wait_until_seen(engine, count):
    """So many units of another's have been seen on the disk; an engine sees its own there, too."""
    disk = tier_mover(engine).disk
    assert comes_true(lambda: len(disk._changes.new.keys() - disk.tier.units.keys()) >= count, 30, 0.02)


def test_a_restart_finds_what_was_on_the_device_and_in_memory(start):
    fill(start(**HOST, **DISK)).close()
    engine = start(**DISK)
    for number in (6, 1, 3):
        assert ask(engine, f"again {number}", tokens(number, 61)) == 61
    assert tiers(engine)["disk"]["arrived"] == 3


def test_what_is_still_being_written_is_waited_for(start, monkeypatch):
    write = Folder.write

    def slowly(self, *file):
        time.sleep(0.03)
        write(self, *file)

    monkeypatch.setattr(Folder, "write", slowly)
    engine = fill(start(**DISK))
    assert ask(engine, "again", tokens(1, 61)) == 61
    assert tiers(engine)["disk"]["lost"] == 0


def test_two_servers_share_a_folder(start, monkeypatch):
    """What one has evicted, the other goes on from, although both were there before; and so the other way."""
    monkeypatch.setattr("serving.tiers.storage._LOOK", 0.02)
    one, other = start(**DISK), start(**HOST, **DISK)
    fill(one)
    tier_mover(one).settle()
    wait_until_seen(other, tiers(one)["disk"]["stored"])
    assert ask(other, "again", tokens(1, 61)) == 61
    assert (tiers(other)["disk"]["arrived"], tiers(other)["disk"]["stored"]) == (1, 0)
    fill(other, numbers=range(11, 17))
    tier_mover(other).settle()
    wait_until_seen(one, tiers(other)["disk"]["stored"])
    assert ask(one, "too", tokens(11, 61)) == 61


def test_weights_that_differ_in_a_few_rows_find_nothing_of_it(start, tmp_path):
    """A sample of 16 values of each tensor was once compared: an engine went on from the states of other weights."""
    fill(start(**DISK)).close()
    changed = model()
    table = parameters(changed)["embed.weight"]
    before = table.get_value()
    table.set_value(before.at[1].add(1.0))
    try:
        assert ask(start(weights=changed, **DISK), "again", tokens(1, 61)) == 0
    finally:
        table.set_value(before)
    assert ask(start(**DISK), "again", tokens(1, 61)) == 61
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_a_release_that_computes_otherwise_finds_nothing_of_it(start, monkeypatch, tmp_path):
    """Nor does an engine with another layout."""
    fill(start(**DISK)).close()
    with monkeypatch.context() as patch:
        patch.setattr("serving.tiers.mover.source_digest", lambda packages: "edited")
        assert ask(start(**DISK), "again", tokens(1, 61)) == 0
    fill(start(state_block_size=32, **DISK), numbers=[1])
    assert ask(start(**DISK), "again", tokens(1, 61)) == 61
    assert len(list((tmp_path / "disk").iterdir())) == 3


def test_dropped_prefixes_are_not_found_below_the_device(start):
    engine = fill(start(**HOST, **DISK))
    tier_mover(engine).settle()
    assert tiers(engine)["host"]["units"] > 0
    engine.loop.scheduler.drop_cached()
    assert ask(engine, "again", tokens(1, 61)) == 0
    assert ask(engine, "once more", tokens(1, 61)) == 61


def test_a_full_disk_leaves_everything_else_as_it_was(start, monkeypatch):
    engine = start(**DISK)

    def full(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    folder = tier_mover(engine).disk.folder
    monkeypatch.setattr(folder, "_put", full)
    fill(engine)
    tier_mover(engine).settle()
    found = tiers(engine)["disk"]
    assert (found["units"], found["stored"], found["stored_bytes"]) == (0, 0, 0)
    assert found["lost"] > 0
    assert not list(folder.path.glob("*.safetensors"))


def test_the_capacity_shown_is_at_most_what_the_disk_has(start, monkeypatch):
    size = SimpleNamespace(free=100_000)
    monkeypatch.setattr("serving.tiers.folder.shutil.disk_usage", lambda path: size)
    one = start(**DISK)
    assert tiers(one)["disk"]["capacity_bytes"] == 100_000
    fill(one)
    one.close()
    held = tiers(one)["disk"]["used_bytes"]
    assert 0 < held <= 100_000
    size.free = 20_000
    files = sum(path.stat().st_size for path in tier_mover(one).disk.folder.path.glob("*.safetensors"))
    assert tiers(start(**DISK))["disk"]["capacity_bytes"] == files + 20_000


def test_others_run_while_a_request_waits(start):
    engine = fill(start(**HOST))
    fetching, begun = tier_mover(engine)._fetching, []
    submit, fetching.submit = fetching.submit, lambda *job: begun.append(job)
    engine.add_request("again", {"prompt_token_ids": tokens(1, 61)}, PARAMS)
    other = engine.add_request("other", {"prompt_token_ids": tokens(9, 30)}, PARAMS)
    while not other.finished:
        engine.step()
    assert begun
    assert engine.num_unfinished == 1
    for job in begun:
        submit(*job)
    finish(engine)
    assert engine.num_unfinished == 0


def test_folders_that_cannot_be_used_are_clear(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder"):
        assemble(EngineConfig.create(**SMALL, disk_cache=str(tmp_path / "file")), model(), programs=NoPrograms())
    # The system refuses to look for the second one, as it does below a folder that may not be entered.
    for below in (tmp_path / "file" / "below", tmp_path / ("long" * 100) / "below"):
        caplog.clear()
        built = assemble(EngineConfig.create(**SMALL, disk_cache=str(below)), model(), programs=NoPrograms())
        assert not built.engine.loop.sources
        assert "cannot be used" in caplog.text
    with pytest.raises(ConfigError, match="does not fit"):
        assemble(EngineConfig.create(**SMALL, host_cache_gib=1 << 20), model(), programs=NoPrograms())
