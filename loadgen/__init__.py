"""Measures servers under the load of many agents that generate, think and come back. Run `python -m loadgen --help`."""
