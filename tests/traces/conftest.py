from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.traces import export
from tests.traces.spans import Spans


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The spans of a traced server that this test starts. They are complete when the server has ended."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(export, "exporter_to", lambda endpoint: exporter)
    return Spans(exporter)
