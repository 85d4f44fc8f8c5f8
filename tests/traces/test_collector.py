"""Whether turns are traced, and spans on the wire: to a collector that takes them, and to one that is away."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from pydantic import ValidationError

import app.telemetry
from app.cli import main
from app.domain.errors import FieldOutOfRange
from app.main import open_traces
from app.settings import Settings
from app.telemetry import spans
from tests.routers.generating import GREEDY
from tests.serving import serve
from tests.traces.conftest import CALLER
from tests.waiting import wait_until

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
traces = [name for name in sys.modules if name == "app.telemetry.spans"]
assert loaded == [], loaded
assert traces == [], traces
"""


@pytest.mark.long
def test_a_server_that_does_not_trace_loads_nothing_of_it() -> None:
    """Of OpenTelemetry it has what the framework imports itself: the bare interface."""
    subprocess.run([sys.executable, "-c", UNTRACED_TURN], check=True, timeout=100)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("app.telemetry.spans", *PACKAGES[:2]))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(app.telemetry, "spans", raising=False)  # another test may have imported it
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)


@pytest.mark.usefixtures("engine_in_a_thread")
def test_a_flag_or_a_variable_without_the_packages_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_packages(monkeypatch)
    assert main(["serve", *TINY, *FLAG]) == 2
    assert "--otlp-endpoint: traces need packages that are not installed" in (said := capsys.readouterr().err)
    assert "pip install 'djinn-server[otel]'" in said
    name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    monkeypatch.setenv(name, "http://127.0.0.1:4318")
    with pytest.raises(FieldOutOfRange, match=f"{name}: traces need packages") as refused:
        open_traces(None)
    assert refused.value.param == name


@pytest.mark.parametrize("url", ["", "a:4318", "http://", "http://a?b=c", "https://a/otlp/v1/traces/"])
def test_what_is_no_collector_and_another_protocol_are_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(ValidationError, match=r"address of a collector|must end before /v1/traces, which Djinn adds"):
        Settings(otlp_endpoint=url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(FieldOutOfRange, match="OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"):
        open_traces("http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("variables", "is_traced"),
    [
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


# Spans on the wire.

TURN = {**GREEDY, "max_tokens": 4}


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP and HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, ExportTraceServiceRequest.FromString(body)))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@contextmanager
def deaf() -> Iterator[str]:
    """The URL of a collector that takes connections and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def take_turn(url: str, **headers: str) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
        session = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
        return http.post(f"{session}/generate", json=TURN).raise_for_status()


def values(attributes: Sequence[KeyValue]) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in attributes}


def assert_a_turn_came(collector: Collector, service: str) -> None:
    path, headers, request = collector.requests[0]
    assert path == "/v1/traces"
    assert headers["content-type"] == "application/x-protobuf"
    (resource,) = request.resource_spans
    assert values(resource.resource.attributes)["service.name"] == service
    (turn,) = [span for span in collector.spans if span.parent_span_id == bytes.fromhex("b" * 16)]
    assert turn.trace_id == bytes.fromhex("a" * 32)
    assert turn.kind == Span.SPAN_KIND_SERVER
    said = values(turn.attributes)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (4, 4)
    below = {span.name for span in collector.spans if span.parent_span_id == turn.span_id}
    assert below == {"queue", "prefill", "decode"}


def test_a_collector_gets_the_spans_of_a_turn_and_nothing_of_the_frameworks(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework would send paths, errors and refused bodies."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    with serve(otlp_endpoint=f"{collector.url}/") as url:
        answer = take_turn(url, traceparent=CALLER)
    assert_a_turn_came(collector, "ours")
    assert answer.headers["traceresponse"][3:35] == "a" * 32
    collector.requests.clear()
    monkeypatch.delenv("OTEL_SERVICE_NAME")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20sesame")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    with serve() as url:
        take_turn(url, traceparent=CALLER)
        httpx.post(f"{url}/v1/completions", json={"prompt": {"swordfish": 1}})
    assert_a_turn_came(collector, "djinn")
    _, headers, request = collector.requests[0]
    assert headers["authorization"] == "Bearer sesame"
    assert values(request.resource_spans[0].resource.attributes)["deployment.environment.name"] == "test"
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    requests = [request for _, _, request in collector.requests]
    scopes = [scope for request in requests for found in request.resource_spans for scope in found.scope_spans]
    assert {scope.scope.name for scope in scopes} == {"djinn"}
    assert b"swordfish" not in b"".join(request.SerializeToString() for request in requests)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go out as soon as they end, and the server's end does not wait for them."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(spans, "CLOSE_S", 0.1)


@pytest.mark.usefixtures("at_once")
def test_a_collector_that_answers_nothing_delays_no_turn() -> None:
    with deaf() as silent, serve(otlp_endpoint=silent) as url:
        began = time.monotonic()
        for _ in range(5):
            take_turn(url)
        assert time.monotonic() - began < 20


@pytest.mark.usefixtures("at_once")
def test_a_collector_that_is_away_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with serve(otlp_endpoint="http://127.0.0.1:9") as url:  # nobody listens there
        wait_until(lambda: take_turn(url).is_success and bool(caplog.records))
    assert [record.name for record in caplog.records] == [spans.__name__]
    assert "takes no spans" in caplog.text
