"""Workloads of the grouped product: real models and odd ones, a decode step's tokens and a prefill's."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One matrix per expert; `tokens` counts each token once per expert it goes to."""

    name: str
    tokens: int
    experts: int
    inputs: int
    outputs: int

    def small(self) -> "Shape":
        """Returns the same experts and tokens up to a point, on sizes that a test can afford."""
        return dataclasses.replace(
            self,
            tokens=min(self.tokens, 300),
            experts=min(self.experts, 24),
            inputs=min(self.inputs, 48),
            outputs=min(self.outputs, 40),
        )


SHAPES = (
    Shape("nemotron-3-nano up, 1 row", 6, 128, 2688, 1856),
    Shape("nemotron-3-nano down, 32 rows", 192, 128, 1856, 2688),
    Shape("nemotron-3-nano up, 512 tokens", 3072, 128, 2688, 1856),
    Shape("nemotron-3-super up, 8 rows", 176, 512, 1024, 2688),
    Shape("granite-4.0-h-small gate and up, 1 row", 10, 72, 4096, 1536),
    Shape("granite-4.0-h-small down, 512 tokens", 5120, 72, 768, 4096),
    Shape("one expert", 33, 1, 24, 40),
    Shape("odd", 77, 5, 9, 13),
)
