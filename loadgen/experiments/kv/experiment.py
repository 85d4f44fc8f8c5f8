"""What a session's KV is made of, how it grows, and what it costs to move, to shrink and to round.

Structure and sizes are read from a running server and from a session that it exported. Copies between tiers are timed
by the server, everything else here.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from loadgen.experiments.each_subject import on_each_subject
from loadgen.experiments.kv.answers import ask_twice
from loadgen.experiments.kv.codecs import CODECS, measure_codec
from loadgen.experiments.kv.copies import copy_in, copy_out, export_session
from loadgen.experiments.kv.fp8 import measure_error
from loadgen.experiments.kv.links import time_loopback
from loadgen.experiments.kv.plan import KVPlan
from loadgen.experiments.kv.report import Findings, KVReport, TargetReport, conclude
from loadgen.experiments.kv.session_file import SessionFile, read_session_file
from loadgen.experiments.kv.structure import read_structure
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, fresh_prompts
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject

EXPORT, OUT, IN, LOOPBACK, CODING, FP8 = (
    "exported session",
    "device to host",
    "host to device",
    "TCP loopback",
    "compression",
    "fp8",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that has answered, and the text of its sessions: the first is exported, the others are parked."""

    subject: Subject
    prompts: tuple[TokenIds, ...]


async def run_kv(specs: Sequence[TargetSpec], plan: KVPlan, corpus: Corpus, console: Console) -> KVReport:
    """Run the experiment on every target. Raises `LoadgenError`, before the first run, if a target cannot serve it.

    Cancelled during a run, it returns what was seen until then.
    """
    targets = await on_each_subject(
        specs, lambda subject: _prepare(subject, plan, corpus), lambda prepared: _measure(prepared, plan, console)
    )
    return KVReport(seed=plan.seed, plan=plan, texts=Texts.of(corpus), targets=targets)


async def _prepare(subject: Subject, plan: KVPlan, corpus: Corpus) -> Prepared:
    """Blocks that have a copy are not copied again, so that prompts must be new."""
    await subject.prepare(plan.tokens + 1 + plan.decoded)
    prompts = await fresh_prompts(plan.repeats + 1, plan.tokens, corpus, plan.seed, subject.tokenize)
    return Prepared(subject, prompts)


async def _measure(prepared: Prepared, plan: KVPlan, console: Console) -> TargetReport:
    findings = Findings()
    spec = prepared.subject.spec
    steps = {EXPORT: 1, OUT: plan.repeats, IN: plan.repeats, LOOPBACK: 1, CODING: len(CODECS), FP8: 2}
    with (
        show_parts(console, spec.name, steps) as advance,
        tempfile.TemporaryDirectory(prefix="loadgen-kv-") as folder,
        ending_early(findings),
        noting(EXPORT, findings.failures),
    ):
        export = Path(folder) / "session.safetensors"
        file = await _export(prepared, export, findings)
        advance(EXPORT)
        await _observe(prepared, plan, export, file, findings, advance)
    return conclude(Server.of(spec), plan.links, findings)


async def _export(prepared: Prepared, export: Path, findings: Findings) -> SessionFile:
    """A session's file; everything else needs it."""
    await export_session(prepared.subject, prepared.prompts[0], export)
    file = read_session_file(export)
    findings.structure = read_structure(await prepared.subject.model(), await prepared.subject.memory(), file)
    return file


async def _observe(
    prepared: Prepared,
    plan: KVPlan,
    export: Path,
    file: SessionFile,
    findings: Findings,
    advance: Callable[[str], None],
) -> None:
    """One part after the other; one that fails does not keep the next from running."""
    subject, failures = prepared.subject, findings.failures
    with noting(OUT, failures):
        findings.copies += await copy_out(subject, prepared.prompts[1:], partial(advance, OUT))
    with noting(IN, failures):
        findings.copies += await copy_in(subject, export, plan.repeats, partial(advance, IN))
    with noting(LOOPBACK, failures):
        findings.loopback = await asyncio.to_thread(time_loopback, file.content, plan.repeats)
        advance(LOOPBACK)
    with noting(CODING, failures):
        for codec in CODECS:
            measured = await asyncio.to_thread(measure_codec, codec, file.full_blocks, plan.repeats)
            findings.compressions.append(measured)
            advance(CODING)
    with noting(FP8, failures):
        findings.fp8_error = measure_error(file.full_blocks)
        findings.fp8_answers = await ask_twice(subject, export, file, plan.decoded, partial(advance, FP8))
