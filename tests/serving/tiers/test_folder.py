"""The folder of the disk tier: what is read is what was written, or nothing; and it never grows beyond its cap."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serving.tiers.folder import ENDING, Folder, unit_of
from serving.tiers.listing import Changes, Listing, make_room
from tests.serving.tiers import folder_books
from tests.serving.tiers.folder_books import B, Disk, arrays_of, unit
from tests.support.waiting import line_of

ROOT = Path(__file__).parents[3]


def test_what_was_used_last_stays_longest_over_a_restart(tmp_path):
    disk = Disk(tmp_path)
    units = [unit([first] * 5)._replace(client=client) for first, client in enumerate((None, "a", "b"))]
    for at, each in enumerate(units):
        disk.store(each)
        os.utime(disk.folder.file(each.name), (at, at))
    disk.folder.used(units[0].name)
    assert list(disk.restart().tier.units.values()) == [units[1], units[2], units[0]], "and count for their clients"


def test_a_smaller_cap_is_kept_at_the_next_start(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    for first in range(6):
        disk.store(unit([first] * 5))
    monkeypatch.setattr(folder_books, "CAP", 20_000)
    again = disk.restart()
    assert 0 < len(again.tier) < 6
    again.check()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 * len(again.tier)


def others_folder(root: Path, name: str, number: int = 0) -> Path:
    """A folder of another model with one part of 1,000 bytes, last used at a time."""
    path = Folder(root / name).path
    part = path / f"{'0' * 40}.safetensors"
    part.write_bytes(bytes(1000))
    os.utime(part, (number, number))
    return path


def test_other_models_folders_make_room_unless_they_are_used(tmp_path):
    for number, name in enumerate("abcd"):
        others_folder(tmp_path, name * 32, number)
    other = Listing(Folder(tmp_path / ("b" * 32)), B, with_blocks=True)
    make_room(tmp_path, tmp_path / ("a" * 32), 3500)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "b", "d"]
    other.close()
    make_room(tmp_path, tmp_path / ("a" * 32), 2500)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "d"]


def test_folders_and_files_that_are_not_ours_stay(tmp_path):
    """A folder with a name of 32 characters was once removed, whatever it held."""
    root = tmp_path / "cache"
    plain = root / ("b" * 32)
    plain.mkdir(parents=True)
    (plain / f"{'1' * 40}.safetensors").write_bytes(bytes(5000))
    named = others_folder(root, "photographs-of-the-last-holidays")
    (named / "photograph.jpg").write_bytes(bytes(5000))
    mixed = others_folder(root, "c" * 32)
    kept = ["model.safetensors", "notes.unfinished", "photograph.jpg"]
    for name in kept:
        (mixed / name).write_bytes(bytes(5000))
    (root / ("d" * 32)).symlink_to(others_folder(tmp_path / "elsewhere", "d" * 32))
    before = sorted(root.parent.rglob("*"))
    make_room(root, root / ("a" * 32), 0)
    assert [path.name for path in before if not path.exists()] == [f"{'0' * 40}.safetensors"]
    assert not (mixed / f"{'0' * 40}.safetensors").exists()
    disk = Disk(mixed)
    disk.store(unit([1] * 5))
    disk.restart()
    assert all((mixed / name).exists() for name in kept), "a look removes only our damaged files"


def test_a_fifo_does_not_hang_anything(tmp_path):
    paths = [tmp_path / name / ("a" * 32) for name in "bcd"]
    for path, name in zip(paths, (f"{unit([1] * 5).name.hex()}{ENDING}", "in-use", "host-1-2.unfinished"), strict=True):
        path.mkdir(parents=True)
        os.mkfifo(path / name)
    code = (
        "import sys; from pathlib import Path; from tests.serving.tiers.folder_books import Disk, unit\n"
        "from serving.tiers.listing import make_room\n"
        "for disk in map(Disk, map(Path, sys.argv[1:])):\n"
        "    assert disk.fetch([1] * 5) == 'miss'; disk.store(unit([1] * 5))\n"
        "    assert disk.fetch([1] * 5) == 'hit'; make_room(disk.folder.path.parent, Path('/'), 0)"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, paths)], cwd=ROOT, timeout=120, check=True)


def test_folders_that_are_made_are_private(tmp_path):
    before = os.umask(0)
    try:
        path = Folder(tmp_path / "one" / "two" / ("a" * 32)).path
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)] == [0o700] * 3


@pytest.mark.smoke
@pytest.mark.parametrize("shard", range(4))
def test_a_thousand_random_faults(shard, tmp_path, monkeypatch):
    """Full and read-only disks, kills in the middle of a file, files cut short, changed, swapped and removed."""
    rng = random.Random(shard)
    disk, put = Disk(tmp_path), Folder._put
    sequences = [[rng.randrange(3) for _ in range(20)] for _ in range(8)]
    met = {"hit": 0, "miss": 0, "dropped": 0, "killed": 0}
    for _ in range(250):
        for _ in range(3):
            disk.store(unit(rng.choice(sequences)[: rng.randrange(1, 20)]))
        files = sorted(tmp_path.glob("*.safetensors"))
        path = rng.choice(files) if files else None
        match rng.randrange(8):
            case 0 if path:
                os.truncate(path, rng.randrange(path.stat().st_size))
            case 1 | 2 if path:
                data = bytearray(path.read_bytes())
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case 3 if path:
                path.unlink()
            case 4 if len(files) > 1 and path:
                path.write_bytes(rng.choice(files).read_bytes())
            case 5 | 6 | 7 as fault:
                at = rng.randrange(200)

                def failing(self, path, data, at=at, fault=fault):
                    if fault == 6:
                        raise OSError(30, "Read-only file system")
                    if fault == 5:
                        path.write_bytes(data[:at])
                        raise OSError(28, "No space left on device")
                    path.with_name(path.name.replace(str(os.getpid()), "4194999")).write_bytes(data[:at])
                    raise SystemExit

                monkeypatch.setattr(Folder, "_put", failing)
                try:
                    disk.store(unit([rng.randrange(9) for _ in range(7)]))
                except SystemExit:
                    met["killed"] += 1
                    disk = disk.restart()
                    assert not list(tmp_path.glob("*.unfinished"))
        monkeypatch.setattr(Folder, "_put", put)
        for _ in range(3):
            met[disk.fetch(rng.choice(sequences)[: rng.randrange(1, 20)])] += 1
        match rng.randrange(10):
            case 0:
                disk = disk.restart()
            case 1:
                disk.look()
        disk.check()
    assert all(count > 10 for count in met.values()), met


WRITER = """
import sys
from pathlib import Path
from tests.serving.tiers.folder_books import Disk, unit
disk = Disk(Path(sys.argv[1]))
number = 0
while True:
    number += 1
    disk.store(unit([number % 50] * (number % 13 + 1)))
    if number == 1:
        print("ready", flush=True)
"""


@pytest.mark.full
def test_kill_9_in_the_middle_of_writing(tmp_path):
    rng = random.Random(1)
    for _ in range(2):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert line_of(writer) == "ready\n"
        time.sleep(rng.random() * 0.2)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        disk = Disk(tmp_path)
        disk.listing.close()
        disk.check()
        assert not list(tmp_path.glob("*.unfinished"))
        assert len(disk.tier) > 0
        for number in range(50):
            assert disk.fetch([number] * 13) in ("hit", "miss")


# -- several processes --


def test_a_block_that_another_process_has_removed_takes_its_units_along(tmp_path):
    one, other = Disk(tmp_path), Disk(tmp_path)
    one.store(unit([1] * 9))
    other.look()
    other.store(unit([1] * 10))
    one.folder.remove(one.tier.drop(unit([1] * 9).name))  # it has not seen the longer one
    other.look()
    assert other.fetch([1] * 10) == "miss"
    for disk in (one, other):
        disk.look()
        disk.look()
        disk.check()
        assert not disk.tier.units
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_unit_whose_blocks_never_came_is_removed(tmp_path):
    disk = Disk(tmp_path)
    lame = unit([1] * 6)
    disk.folder.write(lame.name, arrays_of(lame.name, lame.tail), lame)
    disk.look()
    assert disk.fetch([1] * 6) == "miss"
    assert disk.folder.has(lame.name), "its blocks may have come while it was looked for them"
    disk.look()
    assert not disk.folder.has(lame.name)


def test_blocks_of_a_killed_writer_are_deleted_if_no_process_uses_the_folder(tmp_path):
    killed, (block,) = Disk(tmp_path), unit([1] * 5).blocks
    killed.folder.write(block, arrays_of(block, None))
    time.sleep(0.02)
    other = Disk(tmp_path)
    assert other.folder.has(block), "it may still be writing"
    killed.listing.close()
    assert not other.restart().folder.has(block)


def test_unread_changes_do_not_accumulate():
    changes, number = Changes(), 0
    for number in range(50):
        changes.add(Changes(new={unit([number]).name: unit([number])}))
        changes.add(Changes(gone={unit([number]).name}))
    assert not changes, "an entry added and removed between two reads is no change"
    changes.add(Changes(gone={b"known"}))
    changes.add(Changes(new={b"known": unit([1])}))
    assert (changes.gone, set(changes.new)) == ({b"known"}, {b"known"}), "it may be another's, of another size"


SHARER = """
import sys
from pathlib import Path
from tests.serving.tiers import folder_books
from tests.serving.tiers.folder_books import Disk, unit
folder_books.CAP = 400_000
disk, first = Disk(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
met = {"hit": 0, "miss": 0, "dropped": 0}
for number in range(1, 151):
    disk.store(unit([(number * 7 + first) % 60] * (number % 13 + 1)))
    if number % 2 == 0:
        disk.look()
    met[disk.fetch([(number * 3 + first) % 60] * 13)] += 1
    disk.tier.check()
print(met["hit"], met["miss"], met["dropped"], number, flush=True)
"""


def test_two_processes_share_a_folder_and_its_cap(tmp_path, monkeypatch):
    """Both store, fetch and evict at once, among them each other's: what is read is right, and the cap is kept but for
    what both write between two looks."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARER, str(tmp_path), str(first)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in (0, 30)
    ]  # fmt: skip
    for process in processes:
        assert line_of(process) == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    most = 0
    while any(process.poll() is None for process in processes):
        most = max(most, len(list(tmp_path.glob("*.safetensors"))))
        time.sleep(0.01)
    for process in processes:
        hits, _, dropped, number = map(int, process.stdout.read().split())
        assert hits > 10, "each finds what is there"
        assert dropped < number / 4
        process.stdin.close()
        process.stdout.close()
    # A file counts as 4 KiB at least: 97 of them. Each of both writes four for a unit at most, two units between looks.
    assert 60 < most <= 97 + 2 * 2 * 4
    monkeypatch.setattr(folder_books, "CAP", 400_000)
    disk = Disk(tmp_path)
    disk.look()
    disk.check()
    assert disk.listing.alone
    for number in range(60):
        assert disk.fetch([number] * 13) in ("hit", "miss")


def test_a_flipped_bit_in_a_header_is_noticed_before_the_arrays_are_read(tmp_path):
    """Routers are told of what headers say."""
    disk, tokens = Disk(tmp_path), list(range(11))
    disk.store(unit(tokens))
    name = unit(tokens).name
    path = disk.folder.path / (name.hex() + ENDING)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for at in range(8, 8 + length):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            found = unit_of(path, name, B)
        except ValueError:
            continue
        assert found == unit(tokens), at
