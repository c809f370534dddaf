"""Parses a model's text: reasoning, answers, and tool calls in each format."""
