"""Check that the dashboard's queries have data and the alerts are evaluated, with Prometheus beside a running server.

    python docker/prometheus/check.py URL [--key KEY] -- COMMAND ...

Prometheus scrapes the server once a second while the command runs. The exit status is 1 if a query had no number then.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import yaml

HERE = Path(__file__).parent
DASHBOARD = HERE.parent / "grafana/djinn.json"
START_S = 30
SETTLE_S = 5
"""Scrapes that follow the command."""
INTERVAL_S = 1
VARIABLES = {"$__rate_interval": "15s", "$instance": ".*"}
"""What Grafana would put in their place."""


def configuration(folder: Path, url: str, key: str | None) -> Path:
    """The file of prometheus.yml for the server at `url`, with the rules beside it."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{INTERVAL_S}s", "evaluation_interval": f"{INTERVAL_S}s"}
    config["rule_files"] = [str(HERE / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [urlsplit(url).netloc]}]
    del job["authorization"]
    if key is not None:
        job["authorization"] = {"credentials": key}
    file = folder / "prometheus.yml"
    file.touch(mode=0o600)
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def prometheus(url: str, key: str | None) -> Iterator[str]:
    """A Prometheus that scrapes the server at `url`; yields its own address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "config.file": configuration(Path(folder), url, key),
            "storage.tsdb.path": f"{folder}/data",
            "web.listen-address": address,
            "log.level": "warn",
        }
        process = subprocess.Popen(["prometheus", *(f"--{name}={value}" for name, value in flags.items())])
        try:
            wait_until_ready(f"http://{address}/-/ready")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(url: str) -> None:
    """Return once Prometheus answers; end after `START_S`."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(url):
                return
        except URLError:
            if time.monotonic() > deadline:
                sys.exit("Prometheus did not start")
            time.sleep(0.1)


def ask(base: str, path: str, **parameters: object) -> Any:
    """What Prometheus' API answers."""
    with urlopen(f"{base}/api/v1/{path}?{urlencode(parameters)}") as answer:
        return json.load(answer)["data"]


def queries() -> Iterator[tuple[str, str]]:
    """The title and the PromQL of each query of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def numbers(base: str, query: str, began: float) -> int:
    """How many numbers the query gives from `began` until now."""
    found = ask(base, "query_range", query=query, start=began, end=time.time(), step=INTERVAL_S)["result"]
    return sum(not math.isnan(float(value)) for series in found for _, value in series["values"])


def check(base: str, began: float) -> bool:
    """Print a line for each query and alert; returns whether all is well."""
    well = True
    for title, query in queries():
        count = numbers(base, query, began)
        well = well and count > 0
        print(f"{count:6} numbers  {title}: {query}")
    for group in ask(base, "rules")["groups"]:
        for rule in group["rules"]:
            well = well and rule["health"] == "ok"
            print(f"{rule['health']:>6} {rule['state']:>8}  {rule['name']}  {rule.get('lastError', '')}")
    return well


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--key", help="an operator's key, or one with the role metrics")
    parser.add_argument("command", nargs="+", help="what gives the server something to do")
    arguments = parser.parse_args()
    began = time.time()
    with prometheus(arguments.url, arguments.key) as base:
        status = subprocess.run(arguments.command, check=False).returncode
        time.sleep(SETTLE_S)
        well = check(base, began)
    if status:
        print(f"the command ended with {status}", file=sys.stderr)
    return 0 if well and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
