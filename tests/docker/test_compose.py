"""compose.yaml and the manifests: flags, files, ports and times that fit the server's."""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest

from app.settings import Settings
from app.web.ending import longest_end_s
from app.web.openapi.security import OPEN_PATHS
from loadgen.cli import make_parser
from tests.docker.reading import DOCKER, ROOT, documents, image_environment, instructions, served

VARIABLE = re.compile(r"\$\{(\w+)(?::?[-?]([^}]*))?\}")
(COMPOSE,) = documents("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
BY_KIND = {each["kind"]: each for each in documents("kubernetes/djinn.yaml")}
POD: dict[str, Any] = BY_KIND["StatefulSet"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
PORT = int(image_environment()["DJINN_PORT"])
VOLUMES: list[str] = json.loads(instructions("VOLUME")[0])


@pytest.fixture(autouse=True)
def in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DJINN_API_KEY", "sesame")


def filled(text: str) -> str:
    """With what Compose puts in place of variables that have no value."""
    return VARIABLE.sub(lambda found: found[2] or "value", text)


def settings_of_compose() -> Settings:
    return served(list(map(filled, SERVICES["djinn"]["command"])))


def test_compose_gives_the_server_flags_and_variables_that_it_has() -> None:
    assert settings_of_compose().needs_key
    known = {f"DJINN_{name}".upper() for name in Settings.model_fields} | {"DJINN_API_KEY"}
    assert SERVICES["djinn"]["environment"].keys() - {"OTEL_EXPORTER_OTLP_ENDPOINT"} <= known


def test_each_volume_and_file_of_compose_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert there, (name, source)
    assert {volume.split(":")[1] for volume in SERVICES["djinn"]["volumes"]} == set(VOLUMES)
    assert SERVICES["djinn"]["read_only"]
    assert set(SERVICES["prometheus"]["secrets"]) <= COMPOSE["secrets"].keys()


def test_only_profiles_bring_what_djinn_is_compared_with_and_nothing_is_open_to_other_machines() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    assert profiles == {"vllm": ["baseline"], "loadgen": ["loadgen"]}
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) >= 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert SERVICES["djinn"]["ports"] == [f"127.0.0.1:8000:{PORT}"]


def collector_config() -> dict[str, Any]:
    """The file that the collector is told to read, where Compose puts it."""
    (flag,) = SERVICES["collector"]["command"]
    (volume,) = SERVICES["collector"]["volumes"]
    source, target, _ = volume.split(":")
    path = PurePosixPath(flag.removeprefix("--config=")).relative_to(target)
    (config,) = documents(f"{source}/{path}")
    return dict(config)


def test_spans_go_where_the_collector_listens_and_its_pipeline_has_what_it_names() -> None:
    endpoint = urlsplit(filled(SERVICES["djinn"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]))
    assert (endpoint.scheme, endpoint.hostname) == ("http", "collector")
    config = collector_config()
    protocols = config["receivers"]["otlp"]["protocols"]
    assert protocols == {"http": {"endpoint": f"0.0.0.0:{endpoint.port}"}}, "Djinn speaks HTTP alone"
    (pipeline,) = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == config[kind].keys(), kind
    # The memory limiter comes first, and refuses to start without an interval and a limit.
    assert pipeline["processors"][0] == "memory_limiter"
    assert config["processors"]["memory_limiter"].keys() == {"check_interval", "limit_mib"}


def test_the_load_generators_command_is_one() -> None:
    options = make_parser().parse_args(list(map(filled, SERVICES["loadgen"]["command"])))
    (target,) = options.target
    assert str(PORT) in str(target)


@pytest.mark.parametrize(
    ("arguments", "grace_s"),
    [
        (SERVICES["djinn"]["command"], int(SERVICES["djinn"]["stop_grace_period"].removesuffix("s"))),
        (CONTAINER["args"], POD["terminationGracePeriodSeconds"]),
    ],
    ids=["compose", "kubernetes"],
)
def test_a_drain_ends_before_the_kill(arguments: list[str], grace_s: int) -> None:
    assert grace_s >= longest_end_s(served(list(map(filled, arguments))).drain_timeout_s)


@pytest.mark.parametrize("name", ["operating.md", "container.md"])
def test_the_documents_say_how_long_an_end_may_take(name: str) -> None:
    said = re.findall(r"`--drain-timeout-s` plus (\d+)", (ROOT / "docs" / name).read_text())
    assert said
    assert set(map(float, said)) == {longest_end_s(0)}


def test_prometheus_asks_the_server_and_grafana_finds_prometheus_and_the_dashboard() -> None:
    (config,) = documents("prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"djinn:{PORT}"]
    assert all((DOCKER / "prometheus" / name).exists() for name in config["rule_files"])
    assert job["authorization"]["credentials_file"].rpartition("/")[2] in COMPOSE["secrets"]
    (source,) = documents("grafana/provisioning/datasources/prometheus.yaml")
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    (provider,) = documents("grafana/provisioning/dashboards/djinn.yaml")
    folder = provider["providers"][0]["options"]["path"]
    assert f"./grafana/djinn.json:{folder}/djinn.json:ro" in SERVICES["grafana"]["volumes"]


def test_probes_ask_for_what_needs_no_key() -> None:
    probes = {name: each["httpGet"] for name, each in CONTAINER.items() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN_PATHS
    assert CONTAINER["ports"] == [{"name": probes["readinessProbe"]["port"], "containerPort": PORT}]


def test_the_pod_has_the_rights_and_folders_that_the_image_needs() -> None:
    (user,) = instructions("USER")
    assert str(POD["securityContext"]["runAsUser"]) == user.partition(":")[0]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {*VOLUMES, "/tmp"}
    claims = {each["metadata"]["name"] for each in BY_KIND["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert set(mounts.values()) == claims | {each["name"] for each in POD["volumes"]}


def test_a_service_named_as_the_server_does_not_set_its_variables() -> None:
    """Kubernetes would set DJINN_PORT=tcp://..., which is no port."""
    assert BY_KIND["Service"]["metadata"]["name"] == "djinn"
    assert POD["enableServiceLinks"] is False
    assert BY_KIND["StatefulSet"]["spec"]["replicas"] == 1
    assert BY_KIND["Service"]["spec"]["selector"] == BY_KIND["StatefulSet"]["spec"]["selector"]["matchLabels"]
