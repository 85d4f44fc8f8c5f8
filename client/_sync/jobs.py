# Generated from client/_async by `python client/_generate.py`: make changes there.
"""Jobs that read what many prompts have inside the model."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from client import experiments
from client.calls import UNSET, Seconds, given
from client.errors import JobFailed, NotFound
from client.experiments import ManyPrompts
from client.job_models import ActivationsJobInfo
from client.transport import Transport

LOOKS_S = 1.0
"""How long to wait between two looks at a job."""


class ActivationsJob:
    """A job that reads activations behind everybody else's turns. `info` is what the server last said about it."""

    def __init__(self, transport: Transport, info: ActivationsJobInfo) -> None:
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

    def refresh(self, *, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """Ask the server how the job is."""
        self.info = self._transport.send(experiments.get_job(self.id), timeout)
        return self.info

    def progress(self, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET) -> Iterator[ActivationsJobInfo]:
        """How the job is now, and each time that it has changed, until it is over. It is looked at `every_s` seconds.

        Raises `JobFailed` after the last of these if it has failed.
        """
        told = None
        while True:
            info = self.refresh(timeout=timeout)
            if info != told:
                yield info
            if info.is_over:
                break
            told = info
            time.sleep(every_s)
        if info.status == "failed":
            raise JobFailed(info)

    def wait(self, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """Wait until it is over. Raises `JobFailed`."""
        for _ in self.progress(every_s=every_s, timeout=timeout):
            pass
        return self.info

    def download(self, folder: str | Path, *, every_s: float = LOOKS_S, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """Write each shard into a folder as soon as it is there, until the job is over, and how the job is.

        Shards that the folder has already are not asked for again: call it once more after an interruption, in another
        process too. `read_activations_folder` reads the folder. Raises `JobFailed`, once the shards that there are
        have come; `InvalidRequest` if the folder is another job's; `OSError`.
        """
        for info in self.progress(every_s=every_s, timeout=timeout):
            for shard in experiments.note_manifest(Path(folder), info):
                self._transport.download(experiments.get_file(shard.file_id), Path(folder, shard.name), timeout)
        return self.info

    def cancel(self, *, timeout: Seconds = UNSET) -> ActivationsJobInfo:
        """End the job early. Its shards stay. Raises `Conflict` if it is over."""
        self.info = self._transport.send(experiments.cancel_job(self.id), timeout)
        return self.info

    def delete_files(self, *, timeout: Seconds = UNSET) -> None:
        """Delete its shards and its prompts on the server, which count among your files. The job stays in the list."""
        for file_id in (*(shard.file_id for shard in self.info.shards), self.info.input_file_id):
            with suppress(NotFound):
                self._transport.send(experiments.delete_file(file_id), timeout)


class ActivationsJobs:
    """The jobs of this API key that read activations."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._transport.address!r})"

    def start(
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
    ) -> ActivationsJob:
        """Have up to 100,000 prompts read, as `Djinn.activations` does for a few.

        `prompts` are texts, lists of token ids, or mappings with a `prompt` and an `id`; or they are the path of a file
        with `{"prompt": ..., "id": ...}` on each line. They are sent whole. `features`, such as `{"dictionary": "d",
        "top_k": 10}`, are read in the place of points and layers. Raises `InvalidRequest`, `Unprocessable`,
        `OSError`.
        """
        options = given(locals())
        with experiments.prompts_file(options.pop("prompts")) as path:
            input_file_id = self._transport.upload(experiments.put_prompts(), path, timeout)
        info = self._transport.send(experiments.start_job(input_file_id, options), timeout)
        return ActivationsJob(self._transport, info)

    def get(self, job: str, *, timeout: Seconds = UNSET) -> ActivationsJob:
        """The job with this id. Raises `NotFound`."""
        return ActivationsJob(self._transport, self._transport.send(experiments.get_job(job), timeout))

    def list(self, *, timeout: Seconds = UNSET) -> Iterator[ActivationsJob]:
        """Every job, the newest first."""
        after: str | None = None
        while True:
            page = self._transport.send(experiments.list_jobs(after), timeout)
            for info in page.data:
                yield ActivationsJob(self._transport, info)
            if not page.has_more:
                return
            after = page.data[-1].id
