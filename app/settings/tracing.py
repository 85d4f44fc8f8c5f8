"""Whether turns are traced, as a flag and OpenTelemetry's own variables say."""

import os
from urllib.parse import urlsplit

TRACES_PATH = "/v1/traces"
"""Where a collector takes spans, below its address."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_traced(endpoint: str | None) -> bool:
    """Whether there is a collector, from the flag or from a variable, and no variable turns traces off."""
    is_off = _variable("OTEL_SDK_DISABLED").lower() == "true" or _variable("OTEL_TRACES_EXPORTER").lower() == "none"
    return not is_off and (endpoint is not None or any(map(_variable, ENDPOINTS)))


def check_endpoint(endpoint: str | None) -> None:
    """Raise `ValueError` if spans cannot be sent there."""
    if endpoint is not None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ValueError(f"{endpoint!r} is no address of a collector: a URL such as http://127.0.0.1:4318")
        if url.path.rstrip("/").endswith(TRACES_PATH):
            raise ValueError(f"{endpoint!r} must end before {TRACES_PATH}, which Djinn adds")


def named_by(endpoint: str | None) -> str:
    """What names the collector: the setting of `endpoint`, or the variable that does without."""
    return "otlp_endpoint" if endpoint is not None else next(filter(_variable, ENDPOINTS), ENDPOINTS[-1])


def _variable(name: str) -> str:
    """What it says; empty if it is not set."""
    return os.environ.get(name, "").strip()
