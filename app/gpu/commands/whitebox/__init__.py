"""Carrying out commands that look into the model of a session, or change what it computes there."""
