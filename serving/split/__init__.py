"""Prefill and decode on different workers: the transfer of states and pages, and the roles of those who take part.

`manifest` says what two workers must agree on, `point` takes a resumption point out of a store and puts one in,
`transport` moves its arrays, `prefill_side` and `decode_side` do so between the steps of an engine, `peer` is how one
side talks to the other, `router` stands in front of them.
"""
