"""The protocol: the only definitions of all requests and responses, as pydantic models."""
