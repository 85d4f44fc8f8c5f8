"""Servers that the load generator itself installs, starts and stops, each in its strongest configuration.

Imports nothing: `loadgen.rivals.baseline` also runs in environments that have little of what Djinn needs.
"""
