"""Several hosts run one engine: the leader schedules and speaks HTTP, the followers dispatch what it dispatches.

JAX's distributed runtime joins the hosts' devices into one mesh; its collectives carry everything that layers exchange.
What this room adds is the order of steps: each batch of small host arrays that the leader gives to a program goes to
the followers first (`wire`), over one authenticated connection each (`link`), on which both sides also say that they
live (`party`). See docs/several-hosts.md.
"""
