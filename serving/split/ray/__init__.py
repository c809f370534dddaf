"""A fleet of prefill and decode workers as a Ray Serve application, with autoscaling."""
