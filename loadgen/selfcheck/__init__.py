"""Checks the load generator's own timing, against a server with known delays."""
