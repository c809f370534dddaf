"""Requests, the queues that they stand in, and what is asked on their behalf: drafts, states of other workers."""
