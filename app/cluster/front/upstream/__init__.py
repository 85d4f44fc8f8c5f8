"""Connections to replicas: what is asked over them, where an answer ends, which are open and carry nothing."""
