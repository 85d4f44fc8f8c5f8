"""Putting an engine together: memory is budgeted, weights are loaded."""
