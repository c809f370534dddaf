"""A fleet of prefill and decode workers as a Ray Serve application, and how many of them it needs."""
