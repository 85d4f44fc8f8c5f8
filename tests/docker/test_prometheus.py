"""What the dashboard and the alerts ask for is of a running server, and Prometheus itself takes it."""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docker.reading import DOCKER, ROOT, dashboard, documents
from tests.serving import serve

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)


SELECTED = re.compile(r"\b((?:djinn|vllm)[\w:]+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)(=~|!~|!=|=)\"([^\"]*)\"")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
OF_PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to each sample."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

TARGETS = [(panel["title"], target) for panel in dashboard()["panels"] for target in panel.get("targets", [])]
QUERIES = [(title, target["expr"]) for title, target in TARGETS]
ALERTS = [
    (rule["alert"], rule["expr"])
    for group in documents("prometheus/alerts.yml")[0]["groups"]
    for rule in group["rules"]
]

Series = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    """The values of each label of each series that there can be, once a session has done what there is to count."""
    folder = tmp_path_factory.mktemp("state")
    with serve(state_dir=folder, lease_s=60) as url, httpx.Client(base_url=url, timeout=30) as http:
        session = http.post("/v1/sessions").json()["id"]
        for _ in range(2):
            turn = {"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True}
            http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
        chat = {"model": "tiny-llama", "prompt": "a", "max_tokens": 1, "prompt_cache_key": "k"}
        assert http.post("/v1/completions", json=chat).headers["X-Djinn-Ignored"]
        found: Series = {"up": {}}
        for family in text_string_to_metric_families(http.get("/metrics").text):
            for suffix in SUFFIXES[family.type]:
                found[family.name + suffix] = defaultdict(set)
            for sample in family.samples:
                for label, value in sample.labels.items():
                    found.setdefault(sample.name, defaultdict(set))[label].add(value)
        yield found


@pytest.mark.parametrize(("where", "query"), QUERIES + ALERTS, ids=[where for where, _ in QUERIES + ALERTS])
def test_the_server_has_what_is_asked_for(series: Series, where: str, query: str) -> None:
    selected = SELECTED.findall(query)
    assert selected
    labels = set(OF_PROMETHEUS)
    for name, matchers in selected:
        assert name in series, name
        for label, operator, value in MATCHER.findall(matchers):
            assert label in OF_PROMETHEUS | series[name].keys(), (name, label)
            assert operator != "=" or label in OF_PROMETHEUS or value in series[name][label], (name, value)
        labels |= series[name].keys()
    for grouped in GROUPED.findall(query):
        assert set(re.findall(r"\w+", grouped)) <= labels, grouped


def test_a_legend_names_what_its_query_groups_by_and_any_prometheus_will_do() -> None:
    for title, target in TARGETS:
        grouped = {label for each in GROUPED.findall(target["expr"]) for label in re.findall(r"\w+", each)}
        assert set(LEGEND.findall(target["legendFormat"])) <= grouped, title
    (source,) = [each for each in dashboard()["templating"]["list"] if each["type"] == "datasource"]
    assert {target["datasource"]["uid"] for _, target in TARGETS} == {f"${{{source['name']}}}"}


AGENTS = ["--agents", "24", "--turns", "4", "--context", "256", "--rate", "inf", "--think", "1:2"]


@needs_prometheus
@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config --syntax-only prometheus.yml", "test rules alerts.test.yml"]
)
def test_promtool_takes_the_rules_and_the_configuration_and_alerts_are_there_when_they_should_be(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=DOCKER / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_objects_to_nothing_but_the_colons_of_vllms_names(server_url: str) -> None:
    metrics = httpx.get(f"{server_url}/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True)
    objections = done.stderr.decode().splitlines()
    assert objections
    assert [line for line in objections if not re.match(r"vllm:\w+ metric names should not contain ':'$", line)] == []


@needs_prometheus
@pytest.mark.long
def test_a_density_run_gives_each_query_of_the_dashboard_its_numbers(tmp_path: Path) -> None:
    with serve(
        kv_device="8x512", kv_host="64MiB", state_dir=tmp_path / "state", kv_disk="256MiB", api_keys="sesame"
    ) as url:
        load = [sys.executable, "-m", "loadgen", "density", "--target", f"djinn={url}", "--api-key", "djinn=sesame"]
        load += [*AGENTS, "--output", str(tmp_path)]
        checking = [sys.executable, str(DOCKER / "prometheus/check.py"), url, "--", *load]
        keyed = {**os.environ, "DJINN_API_KEY": "sesame"}
        done = subprocess.run(checking, cwd=ROOT, capture_output=True, text=True, env=keyed)
    assert done.returncode == 0, done.stdout + done.stderr
