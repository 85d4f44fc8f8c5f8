"""Traces: a span of OpenTelemetry for each turn. Without them nothing here but `base.py` is imported."""
