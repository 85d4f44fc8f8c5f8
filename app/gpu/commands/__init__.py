"""Carrying out commands: their effect on a session, and their answer."""
