"""Answers about the whole cluster, each made of those of all replicas."""
