"""Prometheus itself takes the rules, and has numbers for each query of the dashboard once agents have run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.docker.reading import DOCKER, ROOT
from tests.serving import serve

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)
AGENTS = ["--agents", "24", "--turns", "4", "--context", "256", "--rate", "inf", "--think", "1:2"]


@pytest.mark.parametrize(
    "command", ["check rules alerts.yml", "check config --syntax-only prometheus.yml", "test rules alerts.test.yml"]
)
def test_promtool_takes_the_rules_and_the_configuration_and_alerts_are_there_when_they_should_be(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=DOCKER / "prometheus", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_objects_to_nothing_but_the_colons_of_vllms_names(server_url: str) -> None:
    metrics = httpx.get(f"{server_url}/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True)
    objections = done.stderr.decode().splitlines()
    assert objections
    assert [line for line in objections if not re.match(r"vllm:\w+ metric names should not contain ':'$", line)] == []


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
