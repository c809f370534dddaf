"""Books and files of a disk tier together, without an engine: what each part must hold follows from its name."""

from pathlib import Path

import ml_dtypes
import numpy as np

from serving.core.cache.content import Chain, Scope
from serving.core.tiers.tier import Sizes, Tier, Unit
from serving.tiers.folder import DamagedFile, Folder
from serving.tiers.listing import Listing
from tests.serving.core.units import B, unit

PAGE = 2
SIZES = Sizes(state=48, page=16, page_size=PAGE, block=B, overhead=4096)
CAP = 60_000


def arrays_of(name: bytes, tail: int | None) -> dict[str, np.ndarray]:
    """What a part must hold: it follows from its name. `tail`: of a unit's own part; None for a block."""
    rng = np.random.default_rng(int.from_bytes(name[:8], "little"))
    if tail is None:
        return {"kv": rng.standard_normal((1, B, 4)).astype(ml_dtypes.bfloat16)}
    found = {"state": rng.standard_normal((2, 5)).astype(np.float32)}
    found["hidden"] = rng.standard_normal(4).astype(ml_dtypes.bfloat16)
    if tail:
        found["kv"] = rng.standard_normal((1, -(-tail // PAGE) * PAGE, 4)).astype(ml_dtypes.bfloat16)
    return found


class Disk:
    """Books and files together, as the mover has them, for one process's life."""

    def __init__(self, path: Path) -> None:
        self.folder, self.tier = Folder(path), Tier("disk", CAP, SIZES)
        self.listing = Listing(self.folder, B, with_blocks=True)
        self.look()

    def look(self) -> None:
        """Take in what is there, or has changed since the last time."""
        changes = self.listing.look()
        for name in changes.gone:
            self.folder.remove(self.tier.drop_external(name))
        for name in changes.used:
            self.tier.touch(name)
        for found in changes.new.values():
            change = self.tier.add(found)
            if change is not None:
                self.folder.remove(change.gone)

    def restart(self) -> "Disk":
        """The next process's; this one has ended."""
        self.listing.close()
        return Disk(self.folder.path)

    def store(self, new: Unit) -> None:
        change = self.tier.add(new)
        if change is None:
            return
        self.folder.remove(change.gone)
        try:
            for name in change.blocks:
                self.folder.write(name, arrays_of(name, None))
            self.folder.write(new.name, arrays_of(new.name, new.tail), new)
        except OSError:
            self.folder.remove(self.tier.drop(new.name))
            for name in change.blocks:
                if self.tier.holds(name) and not self.folder.has(name):
                    self.folder.remove(self.tier.drop_block(name))

    def fetch(self, tokens) -> str:
        """`hit`, `miss`, or `dropped` where files were damaged or gone; wrong arrays fail."""
        found = self.tier.find(Chain(Scope(None), B), tokens, 0)
        if found is None:
            return "miss"
        assert found.name == unit(tokens[: found.position]).name
        for name, tail in [*((block, None) for block in found.blocks), (found.name, found.tail)]:
            want = arrays_of(name, tail)
            try:
                got = self.folder.read(name, want)
            except (OSError, DamagedFile):
                gone = self.tier.drop_block(name) if tail is None else self.tier.drop(name)
                self.folder.remove(gone)
                return "dropped"
            for key in want:
                assert got[key].dtype == want[key].dtype
                assert got[key].tobytes() == want[key].tobytes()
        return "hit"

    def check(self) -> None:
        self.tier.check()
        assert sum(path.stat().st_size for path in self.folder.path.iterdir()) <= CAP + 2 * 4096
