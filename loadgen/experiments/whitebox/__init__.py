"""Breakpoints between layers: what they change, and what they cost."""
