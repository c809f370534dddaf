"""The server's endpoints, one file for each path or group of paths."""
