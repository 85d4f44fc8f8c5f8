"""Weights that the device has no room for: read ahead into a ring, layer by layer."""
