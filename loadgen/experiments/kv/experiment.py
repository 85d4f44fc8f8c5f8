"""`python -m loadgen kv`: what a session's KV is made of, how it grows, and what it costs to move, shrink and round it.

Structure and sizes are read from a running server and from a session that it exported. Copies between tiers are timed
by the server, everything else here. With `--to` sessions also move to another server.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from client import MemoryMap
from client.models import Model
from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.base import Bench, DjinnExperiment, Found, show_parts
from loadgen.experiments.kv import moving
from loadgen.experiments.kv.codecs import (
    CODECS,
    Compression,
    SessionFile,
    from_fp8,
    measure_codec,
    measure_error,
    read_session_file,
    to_fp8,
)
from loadgen.experiments.kv.copies import (
    NOMINAL_LINKS,
    Copy,
    Link,
    bandwidths,
    check_imported,
    copy_in,
    copy_out,
    export_session,
)
from loadgen.load.prompts import Corpus, TokenIds, fresh_prompts
from loadgen.plans import option
from loadgen.report.report import Chart, ending_early, noting
from loadgen.report.tables import DIRECTIONS, Figure, Row, Table, all_of, exact, in_bytes, in_seconds, in_speed
from loadgen.targets.djinn import Subject, greedy

MIN_TOKENS = 32
"""Less is not a whole block on every server, and too little to time."""
EXPORT, OUT, IN, CODING, FP8 = "exported session", "device to host", "host to device", "compression", "fp8"
MOVES = "moves"
GROWTH, LAYERS = "How a session grows", "layers"
GROWTH_TOKENS = tuple(128 << power for power in range(11))
"""128 to 131,072."""
SENT_TOKENS = (1024, 8192, 32768, 131072)


def _links(text: str) -> tuple[Link, ...]:
    try:
        return tuple(Link.parse(part) for part in text.split(","))
    except LoadgenError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How much is measured.

    Sessions of `tokens` tokens of real text are copied, sent and compressed `repeats` times each. `decoded` tokens show
    what fp8 does to the answer, and what a move does. Sessions of each of `lengths` move.

    Raises `LoadgenError` if a value is outside its range.
    """

    tokens: int = option(1024, "of each measured session", quick=512)
    repeats: int = option(5, "how often each measurement is taken", quick=3)
    decoded: int = option(64, "tokens generated to see what fp8 and a move change", quick=32)
    lengths: tuple[int, ...] = option((256, 512, 1024, 1536), "tokens of the sessions that move", quick=(128, 512))
    links: tuple[Link, ...] = option(
        (), "links to calculate with beside the usual ones", flag="--link", form="NAME=GB/s,...", read=_links
    )
    seed: int = option(0, "of texts")

    def __post_init__(self) -> None:
        require_at_least(MIN_TOKENS, self, "tokens")
        require_at_least(1, self, "repeats", "decoded")
        require_at_least(0, self, "seed")
        if min(self.lengths, default=0) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise LoadgenError("lengths must be different numbers from 1")
        names = [link.name for link in (*NOMINAL_LINKS, *self.links)]
        if len(set(names)) < len(names):
            raise LoadgenError(f"every link needs its own name: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Structure:
    """Layers as `/v1/models` has them, blocks as `/v1/memory` has them, the rest read from the exported file."""

    model: Model
    memory: MemoryMap
    file: SessionFile

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of every layer and head: the textbook's formula, with the file's figures."""
        _, _, _, kv_heads, _, head_dim = self.file.kv.shape
        return int(self.model.layers * 2 * kv_heads * head_dim * self.file.kv.itemsize)

    @property
    def agrees(self) -> bool:
        """Whether the formula leads to the block that the server accounts for, and the file has those blocks."""
        _, _, _, kv_heads, _, head_dim = self.file.kv.shape
        data = self.memory.data
        blocks = -(-self.file.computed_tokens // data.block_tokens)
        shape = (blocks, self.model.layers, 2, kv_heads, data.block_tokens, head_dim)
        return self.bytes_per_token * data.block_tokens == data.block_bytes and self.file.kv.shape == shape

    def session_bytes(self, tokens: int) -> int:
        """KV of a session: whole blocks."""
        data = self.memory.data
        return -(-tokens // data.block_tokens) * data.block_bytes

    def table(self) -> Table:
        """What a token's KV is made of, and where that was read."""
        data, (_, _, _, kv_heads, _, head_dim) = self.memory.data, self.file.kv.shape
        exported = "exported session"
        rows = [
            ("model", self.model.id, "/v1/models"),
            ("longest context", f"{self.model.max_model_len:,} tokens", "/v1/models"),
            ("layers", f"{self.model.layers}", "/v1/models"),
            ("KV heads", f"{kv_heads}", exported),
            ("head size", f"{head_dim}", exported),
            ("element", f"{self.file.dtype}, {self.file.kv.itemsize} bytes", exported),
            ("bytes per token", f"{self.bytes_per_token:,}", "layers x 2 x heads x size x bytes"),
            ("block", f"{data.block_tokens} tokens, {in_bytes(data.block_bytes)}", "/v1/memory"),
            (exported, f"{self.file.computed_tokens:,} tokens, {in_bytes(len(self.file.content))}", "its file"),
        ]
        named = [{"": name, "found": f"{value}", "read from": origin} for name, value, origin in rows]
        return Table("What KV is made of", named)

    def growth(self) -> Table:
        """How a session grows, whatever the model's context: what a longer one would need is part of the question."""
        data = self.memory.data
        rows: list[Row] = [
            {
                "tokens": tokens,
                "KV of one session": in_bytes(size),
                "MiB": size / 2**20,
                "sessions on the device": data.device.total_bytes // size,
                "sessions on the host": data.host.total_bytes // size,
            }
            for tokens in GROWTH_TOKENS
            for size in (self.session_bytes(tokens),)
        ]
        note = (
            f"Device {in_bytes(data.device.total_bytes)}, host {in_bytes(data.host.total_bytes)}. The model's context "
        )
        return Table(GROWTH, rows, f"{note}has {self.model.max_model_len:,} tokens.")


@dataclass(slots=True)
class Seen:
    """What was measured; what could not be is None or empty."""

    structure: Structure | None = None
    copies: list[Copy] = field(default_factory=list)
    compressions: list[Compression] = field(default_factory=list)

    def links(self, plan: KVPlan) -> list[Link]:
        """By nominal speed, and then those that were measured."""
        nominal = sorted((*NOMINAL_LINKS, *plan.links), key=lambda link: link.bytes_per_s)
        measured = [Link(DIRECTIONS[way], speed, measured=True) for way, speed in bandwidths(self.copies).items()]
        return [*nominal, *measured]


async def prepare(bench: Bench[KVPlan]) -> tuple[TokenIds, ...]:
    """Texts of sessions: the first is exported, the others are parked. Blocks that have a copy are not copied again, so
    that prompts must be new.
    """
    plan, subject = bench.plan, bench.subject
    await subject.prepare(plan.tokens + 1 + plan.decoded)
    for spec in bench.others:
        goal = Subject(spec)
        try:
            await moving.warm((goal, subject), max(plan.lengths), plan.decoded)
        finally:
            await goal.close()
    return await fresh_prompts(plan.repeats + 1, plan.tokens, bench.corpus, plan.seed, subject.tokenize)


async def measure(bench: Bench[KVPlan], prompts: tuple[TokenIds, ...], found: Found) -> None:
    """All parts; the exported session comes first, everything else needs it."""
    plan, seen = bench.plan, Seen()
    steps = {EXPORT: 1, OUT: plan.repeats, IN: plan.repeats, CODING: len(CODECS), FP8: 2}
    steps |= {MOVES: len(plan.lengths) * plan.repeats} if bench.others else {}
    with (
        show_parts(bench.console, bench.subject.spec.name, steps) as advance,
        tempfile.TemporaryDirectory(prefix="loadgen-kv-") as folder,
        ending_early(found),
        noting(EXPORT, found.failures),
    ):
        export = Path(folder) / "session.safetensors"
        await export_session(bench.subject, prompts[0], export)
        file = read_session_file(export)
        seen.structure = Structure(await bench.subject.model(), await bench.subject.memory(), file)
        advance(EXPORT)
        await _observe(bench, prompts[1:], export, file, seen, found, advance)
    _conclude(plan, seen, found)


async def _observe(
    bench: Bench[KVPlan],
    prompts: Sequence[TokenIds],
    export: Path,
    file: SessionFile,
    seen: Seen,
    found: Found,
    advance: Callable[[str], None],
) -> None:
    """One part after the other; one that fails does not keep the next from running."""
    subject, plan = bench.subject, bench.plan
    with noting(OUT, found.failures):
        seen.copies += await copy_out(subject, prompts, partial(advance, OUT))
    with noting(IN, found.failures):
        seen.copies += await copy_in(subject, export, plan.repeats, partial(advance, IN))
    with noting(CODING, found.failures):
        for codec in CODECS:
            seen.compressions.append(await asyncio.to_thread(measure_codec, codec, file.full_blocks, plan.repeats))
            advance(CODING)
    with noting(FP8, found.failures):
        found.tables += _fp8_tables(file)
        found.figures.append(await _ask_rounded(subject, export, file, plan.decoded, partial(advance, FP8)))
    for spec in bench.others:
        goal = Subject(spec)
        try:
            await goal.prepare(1)
            journeys = await moving.move_all(
                subject,
                goal,
                plan.lengths,
                plan.repeats,
                plan.decoded,
                bench.corpus,
                plan.seed,
                found.failures,
                partial(advance, MOVES),
            )
        finally:
            await goal.close()
        found.figures += moving.figures(journeys)
        found.tables += moving.tables(journeys)
        found.charts.append(moving.chart())


async def _ask_rounded(
    subject: Subject, export: Path, file: SessionFile, tokens: int, step: Callable[[], None]
) -> Figure:
    """Import the session as it is, and again with its full blocks rounded to fp8, and let both go on, greedily.

    Raises `client.DjinnError`, and `LoadgenError` if the server keeps no KV of imported sessions.
    """

    async def go_on(path: Path) -> TokenIds:
        async with subject.imported(path) as session:
            check_imported(subject, session)
            answer = (await session.generate(**greedy((), tokens))).token_ids
        step()
        return answer

    as_it_is = await go_on(export)
    changed = export.with_name("rounded.safetensors")
    changed.write_bytes(file.with_blocks(from_fp8(to_fp8(file.full_blocks), np.dtype(file.kv.dtype))))
    pairs = zip(as_it_is, await go_on(changed), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return exact("tokens said with KV of eight bits as with its own", f"of {len(as_it_is)}", same)


def _fp8_tables(file: SessionFile) -> Iterator[Table]:
    halves = measure_error(file.full_blocks)
    rows: list[Row] = [
        {
            "": name,
            "relative error": f"{half.relative:.2%}",
            "worst layer": f"{max(half.layers):.2%}",
            "which is": half.layers.index(max(half.layers)),
            "clipped at 448": f"{half.clipped:.4%}",
            "became zero": f"{half.zeroed:.4%}",
        }
        for name, half in halves.items()
    ]
    note = "E4M3 without a scale. Relative error: length of the error over length of the values (L2)."
    yield Table("What fp8 loses", rows, note)
    layers: list[Row] = [
        {"half": name, "layer": layer, "error_percent": 100 * error}
        for name, half in halves.items()
        for layer, error in enumerate(half.layers)
    ]
    yield Table(LAYERS, layers, shown=False)


def _conclude(plan: KVPlan, seen: Seen, found: Found) -> None:
    """What follows from what was measured, by calculation alone."""
    if seen.structure is None:
        return
    structure, links = seen.structure, seen.links(plan)
    agrees = all_of("blocks of the server that are those of the file", int(structure.agrees), 1)
    found.figures[:0] = [agrees, exact("KV of a token", "bytes", structure.bytes_per_token)]
    found.tables[:0] = [
        structure.table(),
        structure.growth(),
        _transfer_table(structure, links),
        *_codec_tables(seen.compressions),
        Table(
            "copies",
            [{"direction": each.direction, "bytes": each.bytes, "seconds": each.seconds} for each in seen.copies],
            shown=False,
        ),
    ]
    found.charts[:0] = _charts(structure)


def _charts(structure: Structure) -> list[Chart]:
    """Pictures of the tables that `_conclude` adds."""
    data = structure.memory.data
    rooms = {"room on the device": data.device.total_bytes / 2**20, "room on the host": data.host.total_bytes / 2**20}
    title, caption = "KV of a session as it grows", f"{structure.bytes_per_token:,} bytes a token, in whole blocks."
    levels = {name: size for name, size in rooms.items() if size}
    grows = Chart(title, caption, "lines", GROWTH, "tokens", "MiB", "", {}, "tokens", "MiB", True, True, levels)
    title = "What fp8 loses, layer by layer"
    caption = "Length of the error over length of the values, of all tokens and heads."
    unit = "relative error, %"
    return [grows, Chart(title, caption, "lines", LAYERS, "layer", "error_percent", "half", {}, "layer", unit)]


def _kind(link: Link) -> str:
    return "measured" if link.measured else "nominal"


def _transfer_table(structure: Structure, links: Sequence[Link]) -> Table:
    """How long sessions of some lengths take over each link."""
    rows: list[Row] = [
        {
            "link": link.name,
            "speed is": _kind(link),
            "speed": in_speed(link.bytes_per_s),
            **{f"{n:,} tokens": in_seconds(link.seconds(structure.session_bytes(n))) for n in SENT_TOKENS},
        }
        for link in links
    ]
    note = (
        "Measured: between device, host and disk by the server's own clock, while one session was sent there. Times "
        "are bytes over speed: neither latency nor protocol is in nominal links."
    )
    return Table("How long a session takes to move", rows, note)


def _codec_tables(compressions: Sequence[Compression]) -> Iterator[Table]:
    """How small KV becomes, how fast, and on which links that pays."""
    rows = []
    for found in compressions:
        saved = found.raw_bytes - found.packed_bytes
        in_turn = saved / (found.pack_s + found.unpack_s)
        pipelined = found.raw_bytes / max(found.pack_s, found.unpack_s) if saved > 0 else 0.0
        rows.append(
            {
                "codec": found.codec,
                "kind": "lossless" if found.lossless else "lossy",
                "smaller": f"{found.ratio:.2f}x",
                "packs": in_speed(found.pack_bytes_per_s),
                "unpacks": in_speed(found.unpack_bytes_per_s),
                "pays below, in turn": in_speed(in_turn) if saved > 0 else "never",
                "pays below, pipelined": in_speed(pipelined) if saved > 0 else "never",
            }
        )
    note = (
        "One thread of the CPU, on one exported session's KV. Lossless codecs gave back every byte. Speeds are of "
        "bytes before packing; the last two columns are speeds of a link."
    )
    yield Table("Making it smaller", rows, note)


def _add_goal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", metavar="TARGET", help="move sessions of the target there too: a Djinn server, as --target names it"
    )


def _goal(options: argparse.Namespace) -> list[str]:
    if options.to is not None and len(options.target) != 1:
        raise LoadgenError(f"--to takes the sessions of one target, not of {len(options.target)}")
    return [] if options.to is None else [options.to]


def _lead(plan: KVPlan, corpus: Corpus) -> str:
    return f"Sessions of {plan.tokens:,} tokens of real text ({corpus.name}), everything {plan.repeats} times."


KV = DjinnExperiment(
    "kv",
    "What a session's KV is, and what it costs to move",
    KVPlan,
    _lead,
    prepare,
    measure,
    disk=True,
    more_options=_add_goal,
    others=_goal,
)
