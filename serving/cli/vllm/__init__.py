"""vLLM's command line for people who know it by heart: every flag of `vllm serve` that they type has an answer here."""
