"""Prefill and decode on different workers: roles, and the transfer of states and pages.

`manifest` compares two workers' settings, `transport` sends arrays, `prefill_side` and `decode_side` exchange states
between the steps of their engines, `peer` is the decode side's interface to a prefill worker, and `router` distributes
requests.
"""
