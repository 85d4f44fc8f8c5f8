"""Measurements of Djinn beside other servers, and of its own parts. Nothing here is needed to serve."""
