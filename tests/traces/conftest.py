"""What the tests of traces share: spans that are kept in memory, and what they say."""

from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.telemetry import spans

CALLER = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
RESUMER = "00-" + "c" * 32 + "-" + "d" * 16 + "-01"
COLLECTOR = "http://127.0.0.1:4318"
"""Names one, where a test keeps the spans itself."""


class Spans:
    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def __iter__(self) -> Iterator[ReadableSpan]:
        return iter(self._exporter.get_finished_spans())

    @property
    def turns(self) -> list[ReadableSpan]:
        """Those of turns, in the order in which the turns began."""
        return sorted((span for span in self if attribute(span, "gen_ai.conversation.id")), key=began)

    def turn(self) -> ReadableSpan:
        (found,) = self.turns
        return found

    def below(self, span: ReadableSpan) -> list[ReadableSpan]:
        """Its children, in the order in which they began."""
        own = [each for each in self if each.parent is not None and each.parent.span_id == span_id(span)]
        return sorted(own, key=began)

    def tree(self, span: ReadableSpan) -> list[str | tuple[str, list[str]]]:
        """The names of its children, each with those below it, if there are any."""
        return [
            (each.name, [one.name for one in self.below(each)]) if self.below(each) else each.name
            for each in self.below(span)
        ]


def began(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def ended(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def attribute(span: ReadableSpan | Event, name: str) -> object:
    return (span.attributes or {}).get(name)


def events(span: ReadableSpan, name: str) -> Sequence[Event]:
    return [event for event in span.events if event.name == name]


def named(span: ReadableSpan) -> str:
    """The span as the header of an answer names it, but for its flags."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"


def assert_nested(spans: Spans) -> None:
    """Every span has ended, and lies within its parent."""
    by_id = {span_id(span): span for span in spans}
    for span in spans:
        assert began(span) <= ended(span)
        if span.parent is not None and span.parent.span_id in by_id:
            parent = by_id[span.parent.span_id]
            assert began(parent) <= began(span)
            assert ended(span) <= ended(parent)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The spans of a traced server that this test starts. They are complete when the server has ended."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "exporter_to", lambda endpoint: exporter)
    return Spans(exporter)
