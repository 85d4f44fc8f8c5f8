"""Processes that the load generator starts, and their virtual environments."""
