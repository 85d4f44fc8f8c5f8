"""What the server answers about jobs, as frozen values."""

from typing import Any, Literal

from client.answer import Answer, Listing


class Shard(Answer):
    """A file on the server with the records of prompts `[first, end)`, of which `failed` have only an error."""

    file_id: str
    first: int
    end: int
    failed: int
    bytes: int

    @property
    def name(self) -> str:
        """That of its file in a folder, where names sort as prompts do."""
        return f"{self.first:06}.safetensors"


class PromptCounts(Answer):
    """Prompts of a job, and those whose records are kept: with activations, or with an error."""

    total: int
    completed: int
    failed: int


class BatchProblem(Answer):
    """What is wrong with the file of a job, or with its `line`, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class JobFeatures(Answer):
    """Which dictionary a job reads, by its name and the SHA-256 of its file, and how many features of each position."""

    dictionary: str
    sha256: str
    top_k: int


class ActivationsJobInfo(Answer):
    """A job that reads activations: what is read, how far it is, and its shards. Times are Unix seconds."""

    id: str
    status: Literal["validating", "in_progress", "cancelling", "cancelled", "completed", "failed"]
    input_file_id: str
    layers: dict[str, tuple[int, ...]]
    features: JobFeatures | None = None
    positions: Literal["all", "last"] | dict[str, Any]
    reduce: Literal["none", "mean", "last"]
    prompts_per_shard: int
    created_at: int
    in_progress_at: int | None
    cancelling_at: int | None
    ended_at: int | None
    prompt_counts: PromptCounts
    shards: tuple[Shard, ...]
    errors: tuple[BatchProblem, ...]

    @property
    def is_over(self) -> bool:
        """Whether there will be no more shards."""
        return self.status in ("cancelled", "completed", "failed")


class ActivationsJobPage(Listing[ActivationsJobInfo]):
    """Some jobs, the newest first."""

    has_more: bool
