"""compose.yaml and the manifests: flags, files, ports, times and names that fit the server's."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
from yaml import safe_load

from app.settings import Settings
from app.web.openapi import OPEN_PATHS
from app.web.server import longest_end_s
from loadgen.cli import make_parser
from tests.docker.reading import DOCKER, ROOT, documents, image_environment, instructions, served

VARIABLE = re.compile(r"\$\{(\w+)(?::?[-?]([^}]*))?\}")
(COMPOSE,) = documents("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
BY_KIND = {each["kind"]: each for each in documents("kubernetes/djinn.yaml")}
OF_CLUSTER = [f"kubernetes/{name}.yaml" for name in ("cluster", "etcd", "door", "autoscaling")]
CLUSTER: dict[tuple[str, str], Any] = {
    (each["kind"], each["metadata"]["name"]): each for file in OF_CLUSTER for each in documents(file)
}
REPLICAS, DOOR = CLUSTER["StatefulSet", "djinn-replica"], CLUSTER["Deployment", "djinn-door"]
POD, POD_OF_REPLICA, POD_OF_DOOR = (
    each["spec"]["template"]["spec"] for each in (BY_KIND["StatefulSet"], REPLICAS, DOOR)
)
(CONTAINER,), (REPLICA,), (PROXY,) = (pod["containers"] for pod in (POD, POD_OF_REPLICA, POD_OF_DOOR))
PORT = int(image_environment()["DJINN_PORT"])
PRE_STOP_S = float(REPLICA["lifecycle"]["preStop"]["exec"]["command"][-1])
OLDEST = "1.28"
"""The first release of Kubernetes whose pods have their index as a label."""
NEED_FIGURES = {"queue-scorer", "kv-cache-utilization-scorer"}
"""Plugins of llm-d's picker that need /metrics, for which it has no key."""
PROGRAM = shutil.which("haproxy")
HAPROXY = (DOCKER / "haproxy.cfg").read_text()
HAPROXY_SERVERS = re.findall(r"^    server ", HAPROXY, re.MULTILINE)
VOLUMES: list[str] = json.loads(instructions("VOLUME")[0])


@pytest.fixture(autouse=True)
def in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DJINN_API_KEY", "sesame")


def filled(text: str) -> str:
    """With what Compose puts in place of variables that have no value."""
    return VARIABLE.sub(lambda found: found[2] or "value", text)


def settings_of_compose(name: str = "djinn") -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in SERVICES[name]["environment"].items():
            if variable.startswith("DJINN_"):
                patch.setenv(variable, filled(value))
        return served(list(map(filled, SERVICES[name]["command"])))


def test_compose_gives_the_server_and_the_load_generator_flags_and_variables_that_they_have() -> None:
    assert settings_of_compose().needs_key
    known = {f"DJINN_{name}".upper() for name in Settings.model_fields} | {"DJINN_API_KEY"}
    assert SERVICES["djinn"]["environment"].keys() - {"OTEL_EXPORTER_OTLP_ENDPOINT"} <= known
    options = make_parser().parse_args(list(map(filled, SERVICES["loadgen"]["command"])))
    (target,) = options.target
    assert str(PORT) in str(target)


def test_each_volume_and_file_of_compose_exists() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            there = (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert there, (name, source)
        copied = [each for each in service.get("secrets", []) if "environment" in COMPOSE["secrets"][each]]
        assert not (service.get("read_only") and copied), f"{name}: Compose writes {copied} into its root"
        assert "build" in service or not service["image"].startswith("djinn"), name
    assert {volume.split(":")[1] for volume in SERVICES["djinn"]["volumes"]} == set(VOLUMES)
    assert SERVICES["djinn"]["read_only"]
    assert set(SERVICES["prometheus"]["secrets"]) <= COMPOSE["secrets"].keys()


def test_only_profiles_bring_what_djinn_is_compared_with_and_nothing_is_open_to_other_machines() -> None:
    profiles = {name: service["profiles"] for name, service in SERVICES.items() if "profiles" in service}
    cluster = {name: ["cluster"] for name in ("cluster", "r0", "r1", "etcd")}
    assert profiles == {"vllm": ["baseline"], "loadgen": ["loadgen"]} | cluster
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


@pytest.mark.parametrize(
    ("arguments", "grace_s"),
    [
        (SERVICES["djinn"]["command"], int(SERVICES["djinn"]["stop_grace_period"].removesuffix("s"))),
        (CONTAINER["args"], POD["terminationGracePeriodSeconds"]),
        (REPLICA["args"], POD_OF_REPLICA["terminationGracePeriodSeconds"] - PRE_STOP_S),
        (SERVICES["r1"]["command"], int(SERVICES["r1"]["stop_grace_period"].removesuffix("s"))),
    ],
    ids=["compose", "alone", "replica", "replica of compose"],
)
def test_a_drain_ends_before_the_kill(arguments: list[str], grace_s: int) -> None:
    said = re.search(r"--drain-timeout-s[= ](\d+)", " ".join(map(filled, arguments)))
    drain_s = float(said[1]) if said else settings_of_compose().drain_timeout_s
    assert grace_s >= longest_end_s(drain_s)


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
    paths = [probes[f"{name}Probe"]["path"] for name in ("startup", "readiness", "liveness")]
    assert paths == ["/health", "/ready", "/health"]
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


@pytest.mark.parametrize("file", [*OF_CLUSTER, "kubernetes/djinn.yaml"])
@pytest.mark.parametrize("release", [OLDEST, "latest"])
@pytest.mark.dev
def test_kubernetes_knows_each_field(file: str, release: str) -> None:
    known = pytest.importorskip("kubernetes_validate", reason="make setup-dev installs it")
    for document in documents(file):
        known.validate(document, known.latest_version() if release == "latest" else release, strict=True)


def arguments_of_replica(index: int) -> list[str]:
    """Those of that pod, in which Kubernetes puts its index in place."""
    return [each.replace("$(POD_INDEX)", str(index)) for each in REPLICA["args"]]


def test_each_replica_has_the_name_and_the_address_by_which_the_others_and_the_door_reach_it() -> None:
    name, service = REPLICAS["metadata"]["name"], REPLICAS["spec"]["serviceName"]
    (port,) = CLUSTER["Service", service]["spec"]["ports"]
    assert CLUSTER["Service", service]["spec"]["clusterIP"] == "None", "pods have names of their own"
    variables = {each["name"]: each.get("value", "") for each in PROXY["env"]}
    servers = re.findall(r'server (r\d) "\$\{REPLICA_PREFIX-r\}(\d)\$\{REPLICA_SUFFIX-\}:(\d+)"', HAPROXY)
    assert len(servers) == CLUSTER["HorizontalPodAutoscaler", name]["spec"]["maxReplicas"] == len(HAPROXY_SERVERS)
    for index, (replica, number, its_port) in enumerate(servers):
        settings = served(arguments_of_replica(index))
        host = f"{name}-{index}.{service}"
        assert (settings.replica, settings.advertise) == (replica, f"http://{host}:{port['port']}")
        assert f"{variables['REPLICA_PREFIX']}{number}{variables['REPLICA_SUFFIX']}".startswith(f"{host}.$(NAMESPACE)")
        assert its_port == str(port["port"])
    for name in ("r0", "r1"):
        settings = settings_of_compose(name)
        assert (settings.replica, settings.advertise) == (name, f"http://{name}:{PORT}")


def test_replicas_ask_etcd_where_it_listens() -> None:
    etcd = CLUSTER["StatefulSet", "djinn-etcd"]["spec"]
    hosts = [f"djinn-etcd-{index}.{etcd['serviceName']}" for index in range(etcd["replicas"])]
    assert served(arguments_of_replica(0)).cluster == "etcd://" + ",".join(f"{host}:2379" for host in hosts)
    (container,) = etcd["template"]["spec"]["containers"]
    (members,) = (each for each in container["args"] if each.startswith("--initial-cluster="))
    assert [one.split("=")[1] for one in members.partition("=")[2].split(",")] == [f"http://{it}:2380" for it in hosts]
    assert settings_of_compose("r0").cluster == "etcd://etcd:2379"


def test_the_door_is_the_one_of_compose_and_haproxy_takes_it() -> None:
    assert CLUSTER["ConfigMap", "djinn-door"]["data"]["haproxy.cfg"] == HAPROXY
    assert SERVICES["cluster"]["image"] == PROXY["image"]
    if PROGRAM is None:
        pytest.skip("haproxy is not installed: apt-get install haproxy")
    environment = {**os.environ, "REPLICA_PREFIX": "10.0.0.1", "REPLICA_SUFFIX": ""}
    command = [PROGRAM, "-c", "-f", str(DOCKER / "haproxy.cfg")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


def test_what_scales_replicas_is_a_metric_that_the_adapter_makes_of_one_of_a_server() -> None:
    rules = documents("kubernetes/prometheus-adapter.yaml")[0]["rules"]["custom"]
    made = {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0] for rule in rules}
    asked = CLUSTER["HorizontalPodAutoscaler", "djinn-replica"]["spec"]["metrics"]
    assert {each["pods"]["metric"]["name"] for each in asked} == made
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} == set(
        re.findall(r"djinn_turns_waiting|djinn_kv_bytes", page)
    )


def test_the_replicas_read_files_where_they_are_mounted() -> None:
    folders = {mount["mountPath"] for mount in REPLICA["volumeMounts"]}
    key = served(arguments_of_replica(0)).cluster_key_file
    assert key is not None
    assert str(key.parent) in folders
    assert settings_of_compose("r0").cluster_key_file == Path("/run/secrets", *SERVICES["r0"]["secrets"])


def test_replicas_are_reached_by_the_cluster_alone_with_the_rights_of_a_server_alone() -> None:
    policy = CLUSTER["NetworkPolicy", "djinn-replica"]["spec"]
    (rule,) = policy["ingress"]
    assert policy["podSelector"] == REPLICAS["spec"]["selector"]
    allowed = [each["podSelector"] for each in rule["from"] if "podSelector" in each]
    labels = {"gateway.networking.k8s.io/gateway-name": "djinn"}, {"inferencepool": "djinn-epp"}  # as llm-d.yaml says
    (of_llm_d,) = documents("kubernetes/llm-d.yaml")
    pool, plugins = of_llm_d["inferencePool"], of_llm_d["inferenceExtension"]["pluginsCustomConfig"]["djinn.yaml"]
    assert (pool["modelServers"], pool["targetPorts"]) == (policy["podSelector"], [{"number": PORT}])
    assert {each["type"] for each in safe_load(plugins)["plugins"]}.isdisjoint(NEED_FIGURES)
    assert allowed == [
        *(each["spec"]["selector"] for each in (DOOR, REPLICAS)),
        *({"matchLabels": it} for it in labels),
    ]
    assert POD_OF_REPLICA["securityContext"] == POD["securityContext"]
    assert REPLICA["securityContext"] == CONTAINER["securityContext"] == PROXY["securityContext"]
    assert REPLICA["resources"]["limits"]["nvidia.com/gpu"] == 1
