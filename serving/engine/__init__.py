"""The loop between host policy and device: plans to arrays, steps, outputs; `LLM` and the async engine."""
