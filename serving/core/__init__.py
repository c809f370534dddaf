"""Host policy: requests, pools, prefix index, scheduler. Pure Python; never imports JAX."""
