"""The protocol: pydantic models of every request and answer, and nowhere else a second definition of them."""
