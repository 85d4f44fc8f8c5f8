"""The way in: only a server that traces imports OpenTelemetry's packages."""

import os

from app.domain.errors import FieldOutOfRange
from app.settings.values import named_by
from app.telemetry.traces import Traces

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"


def open_traces(endpoint: str | None) -> Traces:
    """Traces that go to the collector at the URL `endpoint`; None: where `OTEL_EXPORTER_OTLP_*` say.

    Raises `FieldOutOfRange` if the packages are not installed, or a variable asks for another protocol than HTTP.
    """
    for name in PROTOCOLS:
        if os.environ.get(name, HTTP) not in (HTTP, ""):
            raise FieldOutOfRange(f"{name} must be {HTTP}: spans go out in no other way", param=name)
    try:
        from app.telemetry import export
    except ValueError as error:
        raise FieldOutOfRange(f"OTEL_PROPAGATORS: {error}", param="OTEL_PROPAGATORS") from error
    except ModuleNotFoundError as error:
        name = named_by(endpoint)
        raise FieldOutOfRange(
            f"{name}: traces need packages that are not installed ({error.name}): pip install 'djinn-server[otel]'",
            param=name,
        ) from error
    return export.SpanTraces(export.exporter_to(endpoint))
