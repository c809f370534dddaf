"""Interfaces for clients and operators: the HTTP server, metrics, traces and logs."""
