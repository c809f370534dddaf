"""One step: the arrays of its batch, the loop that dispatches it, and the results it returns."""
