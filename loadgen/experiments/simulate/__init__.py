"""A cluster of any size, simulated with the measured costs of one server."""
