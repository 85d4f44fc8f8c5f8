"""Check that the dashboard's queries have data and the alerts are evaluated, with Prometheus beside a running server.

    python docker/prometheus/check.py URL [--plots FILE.png] -- COMMAND ...

Prometheus scrapes the server once a second while the command runs. The exit status is 1 if a query had no number then.
`--plots` draws the panels; it needs matplotlib. The key of a server with keys is in `DJINN_API_KEY`: an operator's, or
one with the role `metrics`. Others can see arguments in the list of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
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


class Series(NamedTuple):
    """One line of a panel: the values of its labels, and points of seconds since the start and value."""

    name: str
    points: list[tuple[float, float]]


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
            wait_until_it_scrapes(f"http://{address}")
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait()


def wait_until_it_scrapes(base: str) -> None:
    """Return once Prometheus has scraped the server: it begins some seconds after its start. End after `START_S`."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if any(each["value"][1] == "1" for each in ask(base, "query", query="up")["result"]):
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            sys.exit("Prometheus did not scrape the server")
        time.sleep(0.1)


def ask(base: str, path: str, **parameters: object) -> Any:
    """What Prometheus' API answers."""
    with urlopen(f"{base}/api/v1/{path}?{urlencode(parameters)}") as answer:
        return json.load(answer)["data"]


def panels() -> Iterator[tuple[str, list[str]]]:
    """The title of each panel of the dashboard, and its queries as PromQL."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        queries = [target["expr"] for target in panel.get("targets", [])]
        for name, value in VARIABLES.items():
            queries = [query.replace(name, value) for query in queries]
        if queries:
            yield panel["title"], queries


def series_of(base: str, query: str, began: float) -> list[Series]:
    """What the query gives from `began` until now, without what is no number."""
    found = ask(base, "query_range", query=query, start=began, end=time.time(), step=INTERVAL_S)["result"]
    return [
        Series(
            " ".join(each["metric"].values()),
            [(at - began, float(value)) for at, value in each["values"] if not math.isnan(float(value))],
        )
        for each in found
    ]


def draw(found: dict[str, list[Series]], file: Path) -> None:
    """All panels, in rows of three."""
    from matplotlib.figure import Figure

    rows = -(-len(found) // 3)
    figure = Figure(figsize=(15, 2.6 * rows), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(rows, 3, squeeze=False).flat, found.items(), strict=False):
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        for each in series:
            axes.plot(*zip(*each.points, strict=True), label=each.name, linewidth=1)
        if any(each.name for each in series):
            axes.legend(fontsize=6)
    figure.savefig(file, dpi=80)


def check(base: str, began: float, plots: Path | None) -> bool:
    """Print a line for each query and alert, what is wrong last; returns whether all is well."""
    wrong, drawn = list[str](), dict[str, list[Series]]()
    for title, queries in panels():
        drawn[title] = []
        for query in queries:
            found = series_of(base, query, began)
            count = sum(len(each.points) for each in found)
            print(f"{count:6} numbers  {title}: {query}")
            wrong += [] if count else [f"{title}: no number of {query}"]
            drawn[title] += [each for each in found if each.points]
    if plots is not None:
        draw(drawn, plots)
    for group in ask(base, "rules")["groups"]:
        for rule in group["rules"]:
            print(f"{rule['health']:>6} {rule['state']:>8}  {rule['name']}  {rule.get('lastError', '')}")
            wrong += [] if rule["health"] == "ok" else [f"{rule['name']}: {rule['health']}"]
    for each in wrong:
        print(each, file=sys.stderr)
    return not wrong


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--plots", type=Path, metavar="FILE.png", help="draw what the queries gave")
    parser.add_argument("command", nargs="+", help="what gives the server something to do")
    arguments = parser.parse_args()
    began = time.time()
    with prometheus(arguments.url, os.environ.get("DJINN_API_KEY") or None) as base:
        status = subprocess.run(arguments.command, check=False).returncode
        time.sleep(SETTLE_S)
        well = check(base, began, arguments.plots)
    if status:
        print(f"the command ended with {status}", file=sys.stderr)
    return 0 if well and status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
