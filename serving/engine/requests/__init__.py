"""A request from its parameters to its outputs: prompts, sampling parameters, stop texts, errors."""
