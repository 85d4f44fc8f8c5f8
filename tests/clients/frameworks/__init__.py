"""Agents of the common frameworks, unmodified, run against a server process: `make test-frameworks`."""
