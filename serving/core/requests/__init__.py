"""Requests, their queues, and the policy of drafts."""
