"""Servers that the load generator itself installs, starts and stops, each in its strongest configuration.

Imports nothing: `loadgen.peers.baseline` also runs in environments that have little of what Djinn needs.
"""
