"""Jobs that read what many prompts have inside the model."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from client import experiments
from client.calls import UNSET, Seconds, given
from client.errors import JobFailed, NotFound
from client.experiments import ManyPrompts
from client.job_models import ActivationsJobInfo
from client.transport import AsyncTransport

LOOKS_S = 1.0
"""How long to wait between two looks at a job."""


class AsyncActivationsJob:
    """A job that reads activations behind everybody else's turns. `info` is what the server last said about it."""

    def __init__(self, transport: AsyncTransport, info: ActivationsJobInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        counts = self.info.prompt_counts
        done = f"{counts.completed + counts.failed}/{counts.total} prompts"
        return f"{type(self).__name__}(id={self.id!r}, status={self.info.status!r}, {done})"

    @property
    def id(self) -> str:
        """The id that other clients know the job by."""
        return self.info.id

    async def refresh(self, *, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """Ask the server how the job is."""
        self.info = await self._transport.send(experiments.get_job(self.id), timeout)
        return self.info

    async def progress(
        self, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET
    ) -> AsyncIterator[ActivationsJobInfo]:
        """How the job is now, and each time that it has changed, until it is over. It is looked at `every_s` seconds.

        Raises `JobFailed` after the last of these if it has failed.
        """
        told = None
        while True:
            info = await self.refresh(timeout=timeout)
            if info != told:
                yield info
            if info.is_over:
                break
            told = info
            await asyncio.sleep(every_s)
        if info.status == "failed":
            raise JobFailed(info)

    async def wait(self, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """Wait until it is over. Raises `JobFailed`."""
        async for _ in self.progress(every_s=every_s, timeout=timeout):
            pass
        return self.info

    async def download(
        self, folder: str | Path, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET
    ) -> ActivationsJobInfo:
        """Write each shard into a folder as soon as it is there, until the job is over, and how the job is.

        Shards that the folder has already are not asked for again: call it once more after an interruption, in another
        process too. `read_activations_folder` reads the folder. Raises `JobFailed`, once the shards that there are
        have come; `InvalidRequest` if the folder is another job's; `OSError`.
        """
        async for info in self.progress(every_s=every_s, timeout=timeout):
            for shard in experiments.note_manifest(Path(folder), info):
                await self._transport.download(experiments.get_file(shard.file_id), Path(folder, shard.name), timeout)
        return self.info

    async def cancel(self, *, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """End the job early. Its shards stay. Raises `Conflict` if it is over."""
        self.info = await self._transport.send(experiments.cancel_job(self.id), timeout)
        return self.info

    async def delete_files(self, *, timeout: Seconds = UNSET) -> None:
        """Delete its shards and its prompts on the server, which count among your files. The job stays in the list."""
        for file_id in (*(shard.file_id for shard in self.info.shards), self.info.input_file_id):
            with suppress(NotFound):
                await self._transport.send(experiments.delete_file(file_id), timeout)


class AsyncActivationsJobs:
    """The jobs of this API key that read activations."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    async def start(
        self,
        prompts: ManyPrompts,
        *,
        points: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        positions: Literal["all", "last"] | Mapping[str, Any] | None = None,
        reduce: Literal["none", "mean", "last"] | None = None,
        prompts_per_shard: int | None = None,
        features: Mapping[str, Any] | None = None,
        timeout: Seconds = UNSET,
    ) -> AsyncActivationsJob:
        """Have up to 100,000 prompts read, as `Djinn.activations` does for a few.

        `prompts` are texts, lists of token ids, or mappings with a `prompt` and an `id`; or they are the path of a file
        with `{"prompt": ..., "id": ...}` on each line. They are sent whole. `features`, such as `{"dictionary": "d",
        "top_k": 10}`, are read in the place of points and layers. Raises `InvalidRequest`, `Unprocessable`,
        `OSError`.
        """
        options = given(locals())
        with experiments.prompts_file(options.pop("prompts")) as path:
            input_file_id = await self._transport.upload(experiments.put_prompts(), path, timeout)
        info = await self._transport.send(experiments.start_job(input_file_id, options), timeout)
        return AsyncActivationsJob(self._transport, info)

    async def get(self, job: str, *, timeout: Seconds = UNSET) -> AsyncActivationsJob:
        """The job with this id. Raises `NotFound`."""
        return AsyncActivationsJob(self._transport, await self._transport.send(experiments.get_job(job), timeout))

    async def list(self, *, timeout: Seconds = UNSET) -> AsyncIterator[AsyncActivationsJob]:
        """Every job, the newest first."""
        after: str | None = None
        while True:
            page = await self._transport.send(experiments.list_jobs(after), timeout)
            for info in page.data:
                yield AsyncActivationsJob(self._transport, info)
            if not page.has_more:
                return
            after = page.data[-1].id
