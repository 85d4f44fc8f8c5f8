"""Recorded layers."""
