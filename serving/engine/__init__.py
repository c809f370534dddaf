"""The engine: converts the scheduler's plans to arrays, runs steps and returns outputs; `LLM` and the async engine."""
