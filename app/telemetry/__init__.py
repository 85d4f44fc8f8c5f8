"""Metrics for Prometheus, and a span for each turn. Only `spans.py` imports OpenTelemetry."""
