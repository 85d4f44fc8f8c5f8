"""Whether turns are traced: flags, variables, and what is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

import app.traces
from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.settings import Settings
from app.traces.opening import open_traces

TINY = ("--model", "random:tiny-llama", "--port", "0", "--kv-device", "4MiB", "--state-dir", "none")
FLAG = ("--otlp-endpoint", "http://127.0.0.1:4318")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "google.protobuf", "requests")
UNTRACED_TURN = f"""
import asyncio, sys
from tests.serving import running_services
from tests.pausing import finish, start

async def take_turn():
    async with running_services() as services:
        session = services.sessions.create()
        await finish(services.sessions, session, start(services.sessions, session))
        assert session.trace is None

asyncio.run(take_turn())
loaded = [name for name in sys.modules if name.startswith({PACKAGES!r})]
traces = [name for name in sys.modules if name.startswith("app.traces.")]
assert loaded == [], loaded
assert sorted(traces) == ["app.traces.base", "app.traces.opening"], traces
"""


@pytest.mark.long
def test_a_server_that_does_not_trace_loads_nothing_of_it() -> None:
    """Of OpenTelemetry it has what the framework imports itself: the bare interface."""
    subprocess.run([sys.executable, "-c", UNTRACED_TURN], check=True, timeout=100)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("app.traces.export", *PACKAGES[:2]))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(app.traces, "export", raising=False)  # another test may have imported it
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)


@pytest.mark.usefixtures("engine_in_a_thread")
def test_a_flag_without_the_packages_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_packages(monkeypatch)
    assert main(["serve", *TINY, *FLAG]) == 2
    assert "--otlp-endpoint: traces need packages that are not installed" in (said := capsys.readouterr().err)
    assert "pip install 'djinn[otel]'" in said


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_variable_without_the_packages_is_what_the_refusal_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without_packages(monkeypatch)
    monkeypatch.setenv(name, "http://127.0.0.1:4318")
    with pytest.raises(FieldOutOfRange, match=f"{name}: traces need packages") as refused:
        open_traces(None)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *((url, "is no address of a collector: a URL such as") for url in ("", "a:4318", "http://", "http://a?b=c")),
        ("https://a/otlp/v1/traces/", "must end before /v1/traces, which Djinn adds"),
    ],
)
def test_what_is_no_collector_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Settings(otlp_endpoint=url)


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(FieldOutOfRange, match="OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"):
        open_traces("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("variables", "is_traced"),
    [
        ({}, False),
        ({"DJINN_OTLP_ENDPOINT": "http://a:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"DJINN_OTLP_ENDPOINT": "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_variables_turn_traces_on_and_off(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_traced: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings().is_traced is is_traced
