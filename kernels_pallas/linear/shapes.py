"""Workloads of the dense product: rows of a decode step and of a prefill, widths of real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """rows x inputs times outputs x inputs."""

    name: str
    rows: int
    inputs: int
    outputs: int

    def small(self) -> "Shape":
        """Returns the same rows, on widths that a test can afford."""
        return dataclasses.replace(self, inputs=min(self.inputs, 96), outputs=min(self.outputs, 120))


SHAPES = (
    Shape("nemotron-h-8b up, 1 row", 1, 4096, 21504),
    Shape("nemotron-h-8b up, 1 + 3 drafts", 4, 4096, 21504),
    Shape("nemotron-h-8b down, 8 rows", 8, 21504, 4096),
    Shape("bamba-9b out, 64 rows", 64, 8192, 4096),
    Shape("granite-4.0-h-small in, 128 rows", 128, 4096, 16768),
    Shape("nemotron-3-nano in, 512 tokens", 512, 2688, 10304),
    Shape("odd", 5, 77, 131),
    Shape("nothing", 0, 64, 64),
)
