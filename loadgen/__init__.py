"""Measures servers from outside: many agents, or breakpoints. Run `python -m loadgen --help`."""
