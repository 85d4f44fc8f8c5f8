"""`python -m benchmarks.fairness.worker`: an attacker, or honest neighbours, in a process that gives way to others."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import sys

import httpx

from benchmarks.fairness.attacks import ATTACKS
from benchmarks.fairness.attacks.base import Model, Target
from benchmarks.fairness.honest import honest

POLITE = 19
"""The client's own work must not take cores from the server: the highest niceness."""
TIMEOUT_S = 60.0


async def run(url: str, key: str, name: str, model: Model, seconds: float) -> Target:
    """Attack for so long. `honest-N` is N honest neighbours."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        target = Target(client, key, model, random.Random(1))
        attack = honest(int(name.removeprefix("honest-"))) if name.startswith("honest-") else ATTACKS[name].run
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(attack(target), seconds)
    return target


def main() -> int:
    """Attack as the command line says, and print what became of it as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("url", "key", "name", "model"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()
    os.nice(POLITE)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = Model(**json.loads(arguments.model))
    target = asyncio.run(run(arguments.url, arguments.key, arguments.name, model, arguments.seconds))
    print(json.dumps({"answers": target.answers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
