"""Runs of layers on a CPU as programs: recorded once for each count of tokens, replayed with one call."""
