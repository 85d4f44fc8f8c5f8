"""Activations in bulk: what up to 100,000 prompts have at some points of the model, one record for each.

A job reads the prompts of a kept file, some hundreds at a time. What these have is one shard, a safetensors file that
is kept as other files of the owner are. A shard is there whole or not at all, and its id follows from the job's. So a
server that starts again goes on with the first shard that is missing, and no record is there twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, islice, takewhile
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import regex
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WithJsonSchema, model_validator

from app.batches.files import PART, FileStore, new_id
from app.batches.jobs import AGAIN, AT_ONCE, LONGEST_WAIT_S, Jobs, Kept, Places
from app.batches.requests import BatchProblem, LineProblem, check_lines
from app.domain.breakpoints import Bytes, TensorParts, TopFeatures
from app.domain.errors import DiskShort, DjinnError, FieldOutOfRange, Unauthenticated
from app.domain.points import ABOUT, Axis
from app.domain.positions import runs_of
from app.domain.values import ModelInfo
from app.experiments.reading import (
    NUMBER_BYTES,
    Found,
    LayersField,
    PointsField,
    PromptField,
    Sites,
    encode,
    find_sites,
    position_bytes,
    read_prompt,
    together,
)
from app.journal.lease import FolderLease
from app.logs import REQUEST
from app.sessions.registry import SessionRegistry
from app.sessions.side_work import Lane
from app.sessions.uploads import Uploads
from app.tenants.tenancy import Tenancy
from app.text.generation import whole_pieces
from app.text.tokenizer import Tokens
from app.web.errors import clean
from app.wire.base import LongList, TokenId, WireModel, page_shape
from app.wire.breakpoints import TopFeaturesBody
from app.wire.tensors import file_parts, to_float32

logger = logging.getLogger(__name__)

MAX_PROMPTS = 100_000
"""Of one job."""
MAX_ASKED, MAX_ASKED_BYTES = 256, 256 << 20
"""Prompts of a request that is answered with their activations, and bytes of these."""
TURNS = 2 * AT_ONCE
"""Prompts that are computed at once: they are short turns, and the engine must not wait for the next."""
MAX_SHARD_BYTES = 128 << 20
"""A shard ends before it has more, unless that is one prompt's alone: it is in memory until it is written."""
SHARDS_AT_ONCE = 2
"""Shards whose prompts are read while another shard is written. A shard may have few long prompts: the engine computes
those of the next shard while the last ones of this shard end.
"""
REGEX_S = 1.0
"""How long a regular expression may take for one prompt."""


MAX_REPEATED = 400_000
"""Length of a regular expression times its least counts: the library writes repetitions out, at 270 bytes each."""
COUNT, NOT_SERVED = regex.compile(r"\{(\d+)"), regex.compile(r"\(\?(?:[A-Za-z01-]*x|R|[+-]?\d|&|P>)")
"""The least count of a repetition. Recursion has no bound in memory, and with flag `x` counts could be hidden."""


@lru_cache(4)
def _compiled(pattern: str) -> Any:
    """The regular expression. Raises `regex.error`, also if it would take much memory, and `RecursionError`."""
    if NOT_SERVED.search(pattern):
        raise regex.error("recursion and flag x are not served")
    if len(pattern) * prod(max(1, int(least)) for least in COUNT.findall(pattern)) > MAX_REPEATED:
        raise regex.error(f"its length times its counts must be at most {MAX_REPEATED}")
    return regex.compile(pattern, cache_pattern=False)


class PositionsBody(WireModel):
    """Positions by what stands there. Exactly one of the fields."""

    token_ids: Annotated[LongList[TokenId], Field(min_length=1, max_length=1024)] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="a regular expression: tokens whose text has a part in a match"
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.token_ids is None) == (self.regex is None):
            raise FieldOutOfRange("positions: give exactly one of token_ids and regex", param="positions")
        if self.regex is not None:
            try:
                _compiled(self.regex)
            except (regex.error, RecursionError) as error:
                why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
                raise FieldOutOfRange(f"positions.regex: {why}", param="positions.regex") from error
        return self


Reduce = Literal["none", "mean", "last"]


_TEXTS = TypeAdapter(list[str] | list[list[TokenId]]).json_schema()
_MANY = {"minItems": 1, "maxItems": MAX_ASKED}
PromptsField = Annotated[LongList[PromptField], WithJsonSchema({"oneOf": [each | _MANY for each in _TEXTS["anyOf"]]})]
"""Generators of clients know no lists of unions: they are told of texts, or of token ids."""


class ActivationsBody(WireModel):
    """What to read, of the prompts of a file, as a job, or of `prompts`, as the answer. Exactly one of these two."""

    input_file_id: str | None = Field(
        None, max_length=256, description='a kept file with {"prompt": ..., "id": ...} on each line'
    )
    prompts: PromptsField | None = Field(
        None, min_length=1, max_length=MAX_ASKED, description="texts or token ids: the answer is their one shard"
    )
    points: PointsField = Field(default_factory=lambda: ["resid_post"], description="names, TransformerLens's too")
    layers: LayersField | None = Field(None, description="counted from 0 (default: all that have the point)")
    features: TopFeaturesBody | None = Field(
        None, description="the most active features of a dictionary, in the place of points and layers: it has its own"
    )
    positions: Literal["all", "last"] | PositionsBody = "all"
    reduce: Reduce = Field("none", description="over the positions: their mean, or only the last of them")
    prompts_per_shard: int = Field(256, ge=1, le=4096)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.input_file_id is None) == (self.prompts is None):
            raise FieldOutOfRange("give exactly one of input_file_id and prompts", param="input_file_id")
        if self.features is not None:
            given = next((name for name in ("points", "layers") if name in self.model_fields_set), None)
            if given is not None:
                raise FieldOutOfRange(f"{given}: the dictionary has its own", param=given)
            if self.reduce == "mean":
                wrong = "reduce: positions have other features, which have no mean: give none or last"
                raise FieldOutOfRange(wrong, param="reduce")
        return self


class PromptLine(WireModel):
    """A line of the file of a job."""

    prompt: PromptField
    id: str | None = Field(None, max_length=512)


class Shard(BaseModel):
    """A kept file with the records of prompts `[first, end)`, counted from 0. `failed` of them have only an error."""

    file_id: str
    first: int
    end: int
    failed: int
    bytes: int


class PromptCounts(BaseModel):
    """Prompts of the file, and those whose records are kept: with activations, or with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class JobFeatures(BaseModel):
    """Which dictionary a job reads, by its name and the SHA-256 of its file, and how many features of each position."""

    dictionary: str
    sha256: str
    top_k: int


class ActivationsJob(BaseModel):
    """A job as it is now, which is the manifest of its shards. Times are in Unix seconds."""

    id: str
    object: Literal["experiment.activations"] = "experiment.activations"
    status: Literal["validating", "in_progress", "cancelling", "cancelled", "completed", "failed"] = "validating"
    input_file_id: str
    layers: dict[str, list[int]] = Field(description="by point, in the order of the tensors' rows")
    features: JobFeatures | None = None
    positions: Literal["all", "last"] | PositionsBody
    reduce: Reduce
    prompts_per_shard: int
    created_at: int
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    prompt_counts: PromptCounts = PromptCounts()
    shards: list[Shard] = []
    errors: list[BatchProblem] = []


ActivationsJobs = page_shape(
    "ActivationsJobs", "Jobs of the caller, the newest first, and whether there are more.", ActivationsJob
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is read of each prompt."""

    sites: Sites
    positions: Literal["all", "last"] | PositionsBody
    reduce: Reduce
    features: TopFeatures | None = None

    @classmethod
    def of(cls, body: ActivationsBody, info: ModelInfo, uploads: Uploads, owner: str | None) -> Self:
        """What the body asks for. Raises `FieldOutOfRange` for what the model lacks, or what no tensor can have,
        `NotFound`, `UploadsFull`.
        """
        if body.features is not None:
            found, asked = uploads.features(owner, body.features.dictionary, body.features.top_k)
            return cls({found.point: (found.layer,)}, body.positions, body.reduce, asked)
        sites = find_sites(body.points, body.layers, info)
        for point, layers in sites.items():
            if body.reduce != "none" and ABOUT[point].axis is Axis.KEYS:
                raise FieldOutOfRange(
                    f"reduce: a {point} has a number for each key, so prompts of other lengths have others: give none",
                    param="reduce",
                )
            shapes = {info.points[point][layer] for layer in layers}
            if len(shapes) > 1:
                raise FieldOutOfRange(
                    f"layers: {point} has not the same width in all of them: ask for those of one width at a time",
                    param="layers",
                )
        return cls(sites, body.positions, body.reduce)

    def choose(self, token_ids: Sequence[int], tokens: Tokens) -> list[int]:
        """The positions of a prompt that are read. Raises `FieldOutOfRange` if the regular expression takes too long.

        A mean needs all of them, and what is reduced to the last only that.
        """
        chosen = list(range(len(token_ids)))
        if self.positions == "last":
            chosen = chosen[-1:]
        elif isinstance(self.positions, PositionsBody):
            if self.positions.token_ids is not None:
                known = frozenset(self.positions.token_ids)
                chosen = [position for position, token_id in enumerate(token_ids) if token_id in known]
            else:
                assert self.positions.regex is not None
                chosen = list(_matched(self.positions.regex, whole_pieces(tokens, token_ids)))
        return chosen[-1:] if self.reduce == "last" else chosen


def _matched(pattern: str, pieces: Sequence[str]) -> Iterator[int]:
    """The pieces of a text that have a character in a match of the pattern."""
    try:
        found = _compiled(pattern).finditer("".join(pieces), timeout=REGEX_S, concurrent=True)
        spans = [each.span() for each in found if each.end() > each.start()]
    except (TimeoutError, MemoryError):
        raise FieldOutOfRange(
            f"positions.regex: it takes more than {REGEX_S:g} s, or much memory, for a prompt", param="positions.regex"
        ) from None
    first = 0
    for position, piece in enumerate(pieces):
        end = first + len(piece)
        while spans and spans[0][1] <= first:
            spans.pop(0)
        if spans and spans[0][0] < end:
            yield position
        first = end


@dataclass(slots=True)
class Record:
    """What is known of one prompt of a shard. `found` has the chosen positions, or with an `error` nothing."""

    index: int
    id: str | None
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    found: Found = field(default_factory=dict)
    error: str | None = None

    @property
    def about(self) -> dict[str, Any]:
        """For the metadata of the shard."""
        known: dict[str, Any] = {"index": self.index, "tokens": len(self.token_ids), "positions": self.positions}
        known["token_ids"] = [self.token_ids[position] for position in self.positions]
        return known | {name: getattr(self, name) for name in ("id", "error") if getattr(self, name) is not None}


def write_shard(records: Sequence[Record], wanted: Wanted, info: ModelInfo) -> list[Bytes]:
    """A shard as the parts of a safetensors file. Not reduced, each prompt has a tensor `{index}.{point}` of `[layers,
    positions, width]`; reduced, all have one `{point}` of `[prompts, layers, width]`, where rows of prompts that failed
    are 0. With heads `[heads, head_dim]` takes the place of `[width]`, and in a pattern `[heads, keys]`. A mean is in
    float32, all else in the model's data type. Of features there are `activations` in float32 and `features`, their
    numbers, in int32: `[positions, top_k]` of each prompt, reduced `[prompts, top_k]`, with 0 and -1 where fewer are
    active. The metadata has all else as JSON, under `activations`.
    """
    tensors = dict[str, TensorParts]()
    whole = [record for record in records if record.error is None]
    if wanted.features is not None:
        tensors = _feature_tensors(records, wanted.reduce, wanted.features.top_k)
    for point, layers in wanted.sites.items() if wanted.features is None else ():
        if wanted.reduce == "none":
            for record in whole:
                of_layers = [record.found[point, layer] for layer in layers]
                tensors[f"{record.index}.{point}"] = _stacked(of_layers)
            continue
        rows = [
            _stacked([record.found[point, layer] for layer in layers]) if record.error is None else None
            for record in records
        ]
        like = next((row for row in rows if row is not None), None)
        if like is not None:
            nothing = replace(like, parts=(bytes(like.nbytes),))
            tensors[point] = _stacked([nothing if row is None else row for row in rows])
    about = {
        "model": info.name,
        "reduce": wanted.reduce,
        "layers": {point: list(layers) for point, layers in wanted.sites.items()},
        "records": [record.about for record in records],
    }
    if wanted.features is not None:
        about["features"] = {"dictionary": wanted.features.name, "sha256": wanted.features.digest}
    return file_parts(tensors, {"activations": json.dumps(about)})


def _feature_tensors(records: Sequence[Record], reduce: Reduce, top_k: int) -> dict[str, TensorParts]:
    tensors, rows = dict[str, TensorParts](), list[tuple[TensorParts, TensorParts]]()
    for record in records:
        values = np.zeros((1, 2 * top_k), "<f4")
        if record.error is None:
            [found] = record.found.values()
            values = to_float32(found.joined()).reshape(-1, 2 * top_k)
        active = values[:, :top_k] > 0
        numbers = np.where(active, values[:, top_k:], -1).astype("<i4")
        shape = (top_k,) if reduce == "last" else active.shape
        strengths = np.where(active, values[:, :top_k], 0).astype("<f4")
        both = (
            TensorParts("float32", shape, (strengths.tobytes(),)),
            TensorParts("int32", shape, (numbers.tobytes(),)),
        )
        if reduce == "last":
            rows.append(both)
        elif record.error is None:
            tensors |= {f"{record.index}.activations": both[0], f"{record.index}.features": both[1]}
    if rows:
        activations, features = zip(*rows, strict=True)
        tensors = {"activations": _stacked(activations), "features": _stacked(features)}
    return tensors


def _stacked(tensors: Sequence[TensorParts]) -> TensorParts:
    parts = tuple(part for each in tensors for part in each.parts)
    return TensorParts(tensors[0].dtype, (len(tensors), *tensors[0].shape), parts)


def _reduced(tensor: TensorParts, reduce: Reduce) -> TensorParts:
    """`[positions, ...]` to `[...]`."""
    whole = tensor.joined()
    if reduce == "last":
        last = whole.rows(whole.shape[0] - 1, whole.shape[0])
        return TensorParts(last.dtype, last.shape[1:], (last.data,))
    found = to_float32(whole).mean(0, dtype=np.float64).astype("<f4")
    return TensorParts("float32", found.shape, (found.tobytes(),))


class Reader:
    """Reads prompts, behind everybody else's turns."""

    def __init__(self, registry: SessionRegistry, tokens: Tokens, places: Places) -> None:
        self.registry, self._tokens, self._places = registry, tokens, places
        self.info: ModelInfo = registry.executor.engine.info

    async def ask(self, owner: str | None, prompts: Sequence[str | list[int]], wanted: Wanted) -> bytes:
        """The shard of a few prompts. Raises what is wrong with any of them."""
        records = [Record(index, None) for index in range(len(prompts))]
        for record, prompt in zip(records, prompts, strict=True):
            await self.registry.side_work.run(owner, self._choose, record, prompt, wanted, f"prompts.{record.index}")
        nbytes = sum(self.size(each, wanted) for each in records)
        if nbytes > MAX_ASKED_BYTES:
            raise FieldOutOfRange(
                f"prompts: their activations would have {nbytes} bytes, and an answer has at most {MAX_ASKED_BYTES}: "
                "ask for less, or send the prompts as a file",
                param="prompts",
            )
        slots = self.slots(owner)

        async def read(record: Record) -> None:
            async with slots:
                await self._read(owner, record, wanted, f"prompts.{record.index}")

        await together(map(read, records))
        return await asyncio.to_thread(lambda: b"".join(write_shard(records, wanted, self.info)))

    def slots(self, owner: str | None) -> asyncio.Semaphore:
        """For the prompts of the owner that are under way: what some have captured is read while others run."""
        free = min(self.registry.table.free(owner, 2 * TURNS), self.registry.turns.free(owner))
        return asyncio.Semaphore(max(1, free))

    def size(self, record: Record, wanted: Wanted) -> int:
        """Bytes of what is kept of a record whose positions have been chosen."""
        count = len(record.positions) if wanted.reduce == "none" else 1
        if wanted.features is not None:
            return count * 2 * wanted.features.top_k * NUMBER_BYTES["float32"]
        return count * position_bytes(wanted.sites, self.info, len(record.token_ids))

    async def choose(self, owner: str | None, record: Record, prompt: str | list[int], wanted: Wanted) -> None:
        """Make a prompt of a job tokens, and choose its positions. What is wrong with it becomes its error."""
        try:
            await self.registry.side_work.run(owner, self._choose, record, prompt, wanted, "prompt")
        except DjinnError as error:
            record.error = clean(error.message)

    async def fill(self, owner: str | None, record: Record, wanted: Wanted) -> None:
        """Read a prompt of a job: again, if the server could not do it now. What is wrong with it becomes its error."""
        while record.error is None:
            try:
                return await self._read(owner, record, wanted, "prompt")
            except DjinnError as error:
                wait_s = min(LONGEST_WAIT_S, float(error.retry_after_s or 1))
                if error.status not in AGAIN and not self.registry.table.draining:
                    record.error = clean(error.message)
                    return None
            await asyncio.sleep(wait_s)
        return None

    def _choose(self, record: Record, prompt: str | list[int], wanted: Wanted, param: str) -> None:
        """Make a prompt tokens. Raises `FieldOutOfRange`, `ContextTooLong`, `MalformedRequest`."""
        record.token_ids = encode(prompt, self._tokens, self.info, param=param)
        record.positions = wanted.choose(record.token_ids, self._tokens)
        if not record.positions:
            raise FieldOutOfRange(f"{param}: positions chooses none of its tokens", param=param)

    async def _read(self, owner: str | None, record: Record, wanted: Wanted, param: str) -> None:
        is_all = len(record.positions) == len(record.token_ids)
        among = () if is_all else runs_of(record.positions)
        record.found = await read_prompt(
            self.registry,
            owner,
            record.token_ids,
            wanted.sites,
            among,
            wanted.features,
            param=param,
            place=partial(self._places.place, TURNS),
        )
        if wanted.reduce != "none":  # or all of a shard would be in memory
            record.found = {site: _reduced(tensor, wanted.reduce) for site, tensor in record.found.items()}


class _KeptJob(Kept[ActivationsJob]):
    """A job and its tenant."""

    job: ActivationsJob


class ActivationJobs(Jobs[ActivationsJob, _KeptJob]):
    """The jobs of all owners. Used on the event loop. Other threads read lines and write shards."""

    noun = "job"

    def __init__(
        self,
        files: FileStore,
        reader: Reader,
        tenancy: Tenancy,
        lease: FolderLease | None,
        uploads: Uploads,
        *,
        max_line_bytes: int,
    ) -> None:
        """Load the jobs of an earlier run, from `activations` in the folder of `files`. Raises `FieldOutOfRange`."""
        self._uploads = uploads
        super().__init__(files.folder / "activations", _KeptJob, files, lease)
        self._reader, self._tenancy, self._max_line_bytes = reader, tenancy, max_line_bytes

    async def create(self, owner: str | None, body: ActivationsBody) -> ActivationsJob:
        """Begin a job. Raises `NotFound`, `FieldOutOfRange`, `Busy`."""
        assert body.input_file_id is not None
        file = self._files.find(owner, body.input_file_id, param="input_file_id")
        wanted, features = Wanted.of(body, self._reader.info, self._uploads, owner), None
        if (read := wanted.features) is not None:
            features = JobFeatures(dictionary=read.name, sha256=read.digest, top_k=read.top_k)
        self._check_room(owner)
        job = ActivationsJob(
            id=new_id("act_"),
            input_file_id=file.id,
            layers={point: list(layers) for point, layers in wanted.sites.items()},
            features=features,
            positions=body.positions,
            reduce=body.reduce,
            prompts_per_shard=body.prompts_per_shard,
            created_at=int(time.time()),
        )
        return await self._add(_KeptJob(owner=owner, job=job))

    async def _run(self, kept: _KeptJob) -> None:
        REQUEST.set({"state": {"is_background": True, "owner": kept.owner}})  # the task is this job's alone
        problem: BatchProblem | None = None
        try:
            with ExitStack() as stack:
                features = self._hold(kept, stack)
                if kept.job.status == "validating":
                    await self._check(kept)
                if not kept.job.errors:
                    await self._until_cancelled(kept, self._work(kept, features))
        except DjinnError as error:
            problem = BatchProblem(code=error.code, message=error.message)
        except ValidationError:
            problem = BatchProblem(code="input_file_lost", message="The input file is another by now.")
        except OSError as error:  # it would say where the file is
            logger.warning("job %s ends early: %s", kept.job.id, error)
            problem = BatchProblem(code="input_file_lost", message="The input file cannot be read.")
        errors = [*kept.job.errors, problem] if problem else kept.job.errors
        ending = "failed" if errors else "cancelled" if self._cancels[kept.job.id].is_set() else "completed"
        while True:
            try:
                return await self._change(kept, status=ending, ended_at=int(time.time()), errors=errors)
            except DiskShort as error:
                logger.warning("job %s waits for the disk: %s", kept.job.id, error)
                await asyncio.sleep(LONGEST_WAIT_S)

    def _hold(self, kept: _KeptJob, stack: ExitStack) -> TopFeatures | None:
        """The features that the job reads, of a dictionary that stays as long as `stack` does. Raises `NotFound`,
        `UploadsFull`, `FieldOutOfRange` if it is another dictionary by now.
        """
        if (asked := kept.job.features) is None:
            return None
        found, features = self._uploads.features(kept.owner, asked.dictionary, asked.top_k)
        if found.file.digest != asked.sha256:
            wrong = f"features.dictionary: {asked.dictionary} is another one by now"
            raise FieldOutOfRange(wrong, param="features.dictionary")
        stack.enter_context(self._uploads.holding(found))
        return features

    async def _check(self, kept: _KeptJob) -> None:
        """Count the lines of the file, and note what is wrong with them."""
        began, registry = time.perf_counter(), self._reader.registry
        path = self._files.path(kept.job.input_file_id)
        async with registry.side_work.turn(kept.owner, Lane.FILE) as piece:
            total, problems = await asyncio.to_thread(check_prompts, path, self._max_line_bytes)
            piece.seconds = time.perf_counter() - began
        status = kept.job.status if problems or kept.job.status == "cancelling" else "in_progress"
        counts, now = PromptCounts(total=total), int(time.time())
        await self._change(kept, status=status, in_progress_at=now, prompt_counts=counts, errors=problems)

    async def _work(self, kept: _KeptJob, features: TopFeatures | None) -> None:
        """Write every missing shard, each while the prompts of the next ones are read. Those of the one
        behind that are made tokens meanwhile.
        """
        job, files, reader = kept.job, self._files, self._reader
        sites: Sites = {}
        for name, layers in job.layers.items():
            sites |= find_sites([name], layers, reader.info)  # the model may be another by now
        wanted = Wanted(sites, job.positions, job.reduce, features)
        shards = list(takewhile(lambda shard: files.has(shard.file_id), job.shards))
        first = shards[-1].end if shards else 0
        reading = deque[tuple[list[Record], asyncio.Task[None]]]()
        writing = asyncio.create_task(asyncio.sleep(0))

        async def write_next() -> None:
            nonlocal writing
            await reading[0][1]
            await writing
            records, _ = reading.popleft()
            writing = asyncio.create_task(self._write(kept, shards, records, wanted))

        try:
            async with aclosing(self._records(kept, first, wanted)) as groups:
                async for records in groups:
                    if kept.owner is not None and self._tenancy.directory.named(kept.owner) is None:
                        raise Unauthenticated("the tenant of the job is no more")
                    if len(reading) == SHARDS_AT_ONCE:
                        await write_next()
                    reading.append((records, asyncio.create_task(self._fill(kept.owner, records, wanted))))
            while reading:
                await write_next()
            await writing
        finally:
            tasks = [writing, *(task for _, task in reading)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, kept: _KeptJob, shards: list[Shard], records: Sequence[Record], wanted: Wanted) -> None:
        """Write the shard that comes behind `shards`, and note it."""
        job, files, file_id = kept.job, self._files, _shard_id(kept.job.id, len(shards))
        if files.has(file_id):  # the server was killed before it had noted the shard
            await files.delete(kept.owner, file_id)
        content = await asyncio.to_thread(write_shard, records, wanted, self._reader.info)
        await asyncio.to_thread(files.path(file_id).with_suffix(PART).unlink, missing_ok=True)
        async with files.writing(kept.owner, file_id) as writer:
            await writer.write(*content)
            await writer.keep(f"{job.id}_{len(shards):05}.safetensors", "batch_output", None)
        first, end = records[0].index, records[-1].index + 1
        failed = sum(record.error is not None for record in records)
        shards.append(Shard(file_id=file_id, first=first, end=end, failed=failed, bytes=sum(map(len, content))))
        await self._change(kept, shards=list(shards), prompt_counts=_counts(job, shards))

    async def _records(self, kept: _KeptJob, first: int, wanted: Wanted) -> AsyncGenerator[list[Record], None]:
        """The prompts from number `first` on, with their positions, as many together as one shard has. Where it ends
        depends on the file alone, so a job that goes on makes the same ones.
        """
        records, nbytes = list[Record](), 0
        with await asyncio.to_thread(self._files.path(kept.job.input_file_id).open, "rb") as opened:
            lines = filter(bytes.strip, opened)
            await asyncio.to_thread(lambda: deque(islice(lines, first), maxlen=0))
            for index in count(first):
                found = await asyncio.to_thread(next, lines, None)
                if found is None:
                    break
                line = PromptLine.model_validate_json(found)
                record = Record(index, line.id)
                await self._reader.choose(kept.owner, record, line.prompt, wanted)
                size = self._reader.size(record, wanted)
                if records and (len(records) == kept.job.prompts_per_shard or nbytes + size > MAX_SHARD_BYTES):
                    yield records
                    records, nbytes = [], 0
                records.append(record)
                nbytes += size
        if records:
            yield records

    async def _fill(self, owner: str | None, records: Sequence[Record], wanted: Wanted) -> None:
        slots = self._reader.slots(owner)

        async def fill(record: Record) -> None:
            async with slots:
                while not self._is_here:  # noqa: ASYNC110 (a lease is looked at)
                    await asyncio.sleep(1)
                await self._reader.fill(owner, record, wanted)

        await together(map(fill, records))


def _counts(job: ActivationsJob, shards: Iterable[Shard]) -> PromptCounts:
    counts = Counter[str]()
    for shard in shards:
        counts.update(failed=shard.failed, completed=shard.end - shard.first - shard.failed)
    return PromptCounts(total=job.prompt_counts.total, **counts)


def _shard_id(job_id: str, number: int) -> str:
    """The id of the file of a shard. Who does not know the job's cannot guess it."""
    return f"file-{hashlib.blake2b(f'{job_id} {number}'.encode(), digest_size=12).hexdigest()}"


def check_prompts(path: Path, max_line_bytes: int) -> tuple[int, list[BatchProblem]]:
    """How many prompts the file of a job has, and its first problems."""

    def check(line: bytes) -> None:
        try:
            PromptLine.model_validate_json(line)
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False, include_input=False)
            where = ".".join(map(str, first["loc"])) or None
            raise LineProblem("invalid_prompt_line", first["msg"], where) from error

    too_many = BatchProblem(code="too_many_prompts", message=f"A job has at most {MAX_PROMPTS:,} prompts.")
    return check_lines(path, check, MAX_PROMPTS, too_many, max_line_bytes, what="prompts")
