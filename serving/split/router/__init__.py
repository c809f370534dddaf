"""The router: OpenAI's API in front, prefill and decode workers behind."""
