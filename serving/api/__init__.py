"""What people and clients touch: the command line."""
