"""Plants each fault of docs/mutations.md, and runs the default tier until a test fails."""
