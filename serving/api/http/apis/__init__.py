"""The APIs that generate text: how each reads a request, and how it writes the response."""
