"""The pages of a row that one of several members has."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclass(frozen=True)
class Stripe:
    """Some pages of a row: every `every`-th, from page `first` (less than `every`) on."""

    first: Int[Array, ""]
    every: int

    def position(self, key: Array, page_size: int) -> Array:
        """Returns the position in the row of the stripe's keys, counted without the other pages."""
        return (self.first + key // page_size * self.every) * page_size + key % page_size

    def pages_before(self, page: Int[Array, "*shape"] | int) -> Int[Array, "*shape"]:
        """Returns how many pages of the stripe come before a page of the row."""
        return (page - 1 - self.first + self.every) // self.every

    def keys_before(self, position: Int[Array, "*shape"] | int, page_size: int) -> Int[Array, "*shape"]:
        """Returns how many keys of the stripe come before a position of the row."""
        page, offset = position // page_size, position % page_size
        return self.pages_before(page) * page_size + jnp.where((page - self.first) % self.every == 0, offset, 0)
