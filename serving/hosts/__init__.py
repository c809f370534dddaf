"""Several hosts run one engine: the leader schedules and serves HTTP, the followers dispatch what it dispatches.

JAX's distributed runtime joins the hosts' devices into one mesh. This package adds the order of steps: before the
leader runs a program, it sends the batch of small host arrays to the followers (`wire`), over one authenticated
connection each (`link`), which also carries heartbeats (`host_group`). See docs/several-hosts.md.
"""
