"""Several hosts run one engine: the leader schedules and serves HTTP, the followers dispatch what it dispatches.

JAX's distributed runtime joins the hosts' devices into one mesh; this package adds the order of steps. See
docs/several-hosts.md.
"""
