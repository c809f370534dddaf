"""Connections: listeners, TLS, keys, limits on the resources of a client, and event streams."""
