"""The manifest of a cluster: replicas and a front door that know each other by the names that Kubernetes gives them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.cluster.moves.peers import read_peers
from app.web.ending import longest_end_s
from tests.docker.reading import documents, served

CLUSTER, ALONE = "kubernetes/cluster.yaml", "kubernetes/djinn.yaml"
BY_NAME: dict[tuple[str, str], Any] = {(each["kind"], each["metadata"]["name"]): each for each in documents(CLUSTER)}
REPLICAS, FRONT = BY_NAME["StatefulSet", "djinn-replica"], BY_NAME["StatefulSet", "djinn-front"]
POD_INDEX = "$(POD_INDEX)"
OLDEST = "1.28"
"""The first release whose pods have their index as a label."""


def pod_of(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def arguments_of(workload: Any) -> list[str]:
    (container,) = pod_of(workload)["containers"]
    return list(container["args"])


def arguments_of_replica(index: int) -> list[str]:
    """Those of that pod, in which Kubernetes puts its index in place."""
    return [each.replace(POD_INDEX, str(index)) for each in arguments_of(REPLICAS)]


@pytest.fixture
def peers(tmp_path: Path) -> dict[str, str]:
    """The addresses in the file of peers, as the server reads it."""
    path = tmp_path / "peers.yaml"
    path.write_text(BY_NAME["ConfigMap", "djinn-cluster"]["data"]["peers.yaml"])
    return {name: peer.url for name, peer in read_peers(path).items()}


@pytest.mark.parametrize("file", [CLUSTER, ALONE])
@pytest.mark.parametrize("release", [OLDEST, "latest"])
@pytest.mark.dev
def test_kubernetes_knows_each_field(file: str, release: str) -> None:
    known = pytest.importorskip("kubernetes_validate", reason="make setup-dev installs it")
    for document in documents(file):
        known.validate(document, known.latest_version() if release == "latest" else release, strict=True)


def test_each_replica_is_a_peer_by_its_own_name_and_address(peers: dict[str, str]) -> None:
    name, service = REPLICAS["metadata"]["name"], REPLICAS["spec"]["serviceName"]
    (port,) = BY_NAME["Service", service]["spec"]["ports"]
    assert BY_NAME["Service", service]["spec"]["clusterIP"] == "None", "pods have names of their own"
    assert REPLICAS["spec"]["replicas"] == len(peers)
    for index in range(len(peers)):
        replica = served(arguments_of_replica(index)).replica
        assert replica is not None
        assert peers[replica] == f"http://{name}-{index}.{service}:{port['port']}"


def test_the_front_door_knows_the_same_replicas(peers: dict[str, str]) -> None:
    targets = [each.removeprefix("--target=") for each in arguments_of(FRONT) if each.startswith("--target=")]
    assert dict(each.split("=", 1) for each in targets) == peers


def test_the_servers_read_files_where_they_are_mounted() -> None:
    (container,) = pod_of(REPLICAS)["containers"]
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    settings = served(arguments_of_replica(0))
    for path in (settings.peers, settings.cluster_key_file):
        assert path is not None
        assert str(path.parent) in folders


@pytest.mark.parametrize("workload", [REPLICAS, FRONT], ids=["replica", "front"])
def test_a_drain_ends_before_the_kill(workload: Any) -> None:
    said = re.search(r"--drain-timeout-s=(\d+)", " ".join(arguments_of(workload)))
    assert said is not None
    assert pod_of(workload)["terminationGracePeriodSeconds"] >= longest_end_s(float(said[1]))


def test_replicas_are_reached_by_the_cluster_alone() -> None:
    policy = BY_NAME["NetworkPolicy", "djinn-replica"]["spec"]
    (rule,) = policy["ingress"]
    assert policy["podSelector"] == REPLICAS["spec"]["selector"]
    allowed = [each["podSelector"] for each in rule["from"]]
    assert allowed == [FRONT["spec"]["selector"], REPLICAS["spec"]["selector"]]


def test_both_manifests_keep_the_same_rights_and_folders() -> None:
    (alone,) = [each for each in documents(ALONE) if each["kind"] == "StatefulSet"]
    for workload in (REPLICAS, FRONT):
        assert pod_of(workload)["securityContext"] == pod_of(alone)["securityContext"]
        (container,), (other,) = pod_of(workload)["containers"], pod_of(alone)["containers"]
        assert container["securityContext"] == other["securityContext"]
        assert container["image"] == other["image"]
