"""Agents on clusters of several sizes, while sessions move and replicas die, against what a single server says."""
