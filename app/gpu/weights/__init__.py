"""Weights as a model sees them: where they come from, and those that stay on the device."""
