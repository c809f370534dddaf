"""The operation: an exponential moving average per head.

    h_t = keep_t * h_{t-1} + (1 - keep_t) * x_t        keep_t = exp(-rate * dt_t)
    y_t = h_t

A token with dt = 0 is padding: it leaves the state as it was. State mathematics is float32; states are rounded to the
store's dtype at the ends of tiles, and after each step of a row.
"""

from tests.extending.average.xla import average_scan, average_sequence, average_update

__all__ = ["average_scan", "average_sequence", "average_update"]
