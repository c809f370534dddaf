"""From requests to steps and back: admission, decode and prefill rows, preemption, publication, settling."""
