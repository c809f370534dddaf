"""An update of the weights of one engine or of all replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from checkpoints.replacement import NewWeights, repeatable
from serving.engine.engine import Engine
from serving.engine.request_error import RequestError
from serving.engine.weights import WeightsChecksum


def common_checksum(found: Sequence[WeightsChecksum]) -> WeightsChecksum:
    """Returns the checksum that all replicas have.

    Raises:
        RequestError: their weights differ.
    """
    if len({each.checksum for each in found}) > 1:
        versions = ", ".join(each.weights_version for each in found)
        raise RequestError(f"replicas have different weights (versions {versions}): send all weights again")
    return found[0]


@dataclass(frozen=True)
class Update:
    """New weights and the engines that need them."""

    weights: NewWeights
    version: str | int | None
    """The requested version. For several replicas without a requested version, the next number."""
    partial: bool
    lacking: Collection[Engine]
    """The engines to update. Engines that already have this version, for example after an update that failed on others,
    are omitted. If all engines have it, all are included, and they refuse the version."""

    @classmethod
    def of(
        cls, engines: Sequence[Engine], given: NewWeights, *, version: str | int | None = None, partial: bool = False
    ) -> Update:
        """Creates an update. The next version follows the replica with the most updates, because a replica that failed
        an update has fewer."""
        if len(engines) == 1:
            return cls(given, version, partial, engines)
        weights = [engine.control.weights for engine in engines]
        name = str(1 + max(each.updates for each in weights)) if version is None else str(version)
        lacking = [e for e, each in zip(engines, weights, strict=True) if each.version != name or not each.whole]
        return cls(repeatable(given), name, partial, lacking or engines)

    def apply(self, engine: Engine) -> str:
        """Updates an engine between two of its steps if it needs the weights. Returns the engine's version.

        Raises:
            RequestError: see `Control.update_weights`.
        """
        if engine in self.lacking:
            return engine.control.update_weights(self.weights, version=self.version, partial=self.partial)
        return engine.control.weights.version
