"""How fast KV moves: between the tiers of a server, by its own clock, and over links by their nominal speed."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from client import AsyncSession, MemoryMap
from client.memory_models import Direction
from client.models import Tier
from loadgen.errors import LoadgenError
from loadgen.load.prompts import TokenIds
from loadgen.targets.djinn import Subject, greedy

POLL_S = 0.005
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Copy:
    """What moved one way while one session was sent there: the difference of the server's totals."""

    direction: Direction
    bytes: int
    seconds: float


async def export_session(subject: Subject, prompt: TokenIds, path: Path) -> None:
    """Compute a session for the prompt, and write it to a file. Raises `client.DjinnError`, `OSError`."""
    async with subject.session() as session:
        await session.generate(**greedy(prompt, 1))
        await session.export_to(path)


async def copy_out(subject: Subject, prompts: Sequence[TokenIds], step: Callable[[], None]) -> tuple[Copy, ...]:
    """Compute a session for each prompt and signal `io_wait`: its KV leaves the device.

    Blocks that have been copied are not copied again, so each session is a new one. Raises `client.DjinnError`, and
    `LoadgenError` if the server does not do as it is told.
    """
    policy = (await subject.memory()).policy
    if policy != "signal":
        raise LoadgenError(f"target {subject.spec.name} does not listen to signals: its policy is {policy}")
    copies: list[Copy] = []
    for prompt in prompts:
        async with subject.session() as session:
            await session.generate(**greedy(prompt, 1))
            before = await subject.memory()
            await session.set_phase("io_wait")
            await wait_for(session, "host")
            copies.extend(moved("out", before, await subject.memory()))
        step()
    return tuple(copies)


async def copy_in(subject: Subject, export: Path, repeats: int, step: Callable[[], None]) -> tuple[Copy, ...]:
    """Import the file and signal `ready`, `repeats` times: its KV comes from the disk to the host and to the device.

    What a session that was parked here returns to is often still on the device, and then nothing is copied; an imported
    session shares nothing. Raises as `copy_out` does.
    """
    copies: list[Copy] = []
    for _ in range(repeats):
        async with subject.imported(export) as session:
            check_imported(subject, session)
            before = await subject.memory()
            await session.set_phase("ready")
            await wait_for(session, "device")
            after = await subject.memory()
            copies.extend((*moved("in", before, after), *moved("from_disk", before, after)))
        step()
    return tuple(copies)


def check_imported(subject: Subject, session: AsyncSession) -> None:
    """Raise `LoadgenError` if only the tokens of an imported session were taken."""
    if session.info.kv.tier is None:
        raise LoadgenError(f"target {subject.spec.name} keeps no KV of an imported session: it has no disk tier")


async def wait_for(session: AsyncSession, tier: Tier) -> None:
    """Return when the session's KV is in `tier`. Raises `LoadgenError` if it does not come there in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while (await session.refresh()).kv.tier != tier:
        if time.monotonic() > deadline:
            raise LoadgenError(f"after {TIMEOUT_S:g} s the KV is in tier {session.info.kv.tier}, not in {tier}")
        await asyncio.sleep(POLL_S)


def moved(direction: Direction, before: MemoryMap, after: MemoryMap) -> Iterator[Copy]:
    """What moved this way between two looks at the server, if anything did."""
    earlier, later = before.moves[direction], after.moves[direction]
    if later.bytes > earlier.bytes:
        yield Copy(direction, later.bytes - earlier.bytes, later.seconds - earlier.seconds)


def bandwidths(copies: Sequence[Copy]) -> Mapping[Direction, float]:
    """Bytes per second each way: the median, so that a first copy into memory never written before does not count."""
    speeds: dict[Direction, list[float]] = {}
    for copy in copies:
        if copy.seconds > 0:
            speeds.setdefault(copy.direction, []).append(copy.bytes / copy.seconds)
    return {direction: statistics.median(found) for direction, found in speeds.items()}


GB = 1e9
"""Speeds are given in powers of ten, as vendors and networks do."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes to go. `measured`: on this machine, in this run; else it is the nominal speed, one way."""

    name: str
    bytes_per_s: float
    measured: bool = False

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `NAME=GB/s`. Raises `LoadgenError`."""
        name, _, speed = text.rpartition("=")
        try:
            gb_per_s = float(speed)
        except ValueError:
            gb_per_s = math.nan
        if not name or not 0 < gb_per_s < math.inf:
            raise LoadgenError(f"--link is NAME=GB/s with a speed above 0, such as wifi=0.1, not {text!r}")
        return cls(name, gb_per_s * GB)

    def seconds(self, size: float) -> float:
        """How long `size` bytes take at this speed; latency is left out."""
        return size / self.bytes_per_s


NOMINAL_LINKS = (
    Link("1 GbE", 0.125 * GB),
    Link("10 GbE", 1.25 * GB),
    Link("100 GbE", 12.5 * GB),
    Link("PCIe 4 x16", 31.5 * GB),
    Link("PCIe 5 x16", 63.0 * GB),
    Link("NVLink 4", 450.0 * GB),
)
"""Line rates one way. PCIe: 16 lanes of 16 and 32 GT/s with 128b/130b encoding, before packet headers. NVLink 4: the 18
links of an H100, 900 GB/s both ways together, by NVIDIA's data sheet."""
