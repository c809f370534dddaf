"""A resumption point outside of its store: what it consists of, and the programs that take one out and put one in."""
