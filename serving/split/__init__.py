"""Prefill and decode on different workers: two sides, `http` between them, a `router`, and `transport` of arrays."""
