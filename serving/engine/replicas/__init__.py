"""Several engines of one model with the interface of one engine."""
