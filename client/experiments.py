"""What `Djinn.patching` and `Djinn.activations` answer, also as a job, and the calls that ask for it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from client.answer import Answer
from client.calls import Call, nothing, path_part
from client.errors import InvalidRequest
from client.files import written_whole
from client.job_models import ActivationsJobInfo, ActivationsJobPage, Shard
from client.pictures import Cell, Picture, heatmap, shown, svg
from client.tensors import FloatArray, load

ACTIVATIONS = "/v1/experiments/activations"
MANIFEST = "manifest.json"
"""The job as it was last seen, beside its shards."""

Prompts = Sequence[str | Sequence[int]]
ManyPrompts = str | Path | Iterable[str | Sequence[int] | Mapping[str, Any]]
"""The path of a file, or prompts: texts, token ids, or what a line of the file has."""


class PatchingTable(Answer):
    """The metric with each place of one point patched: a list for each of `layers`, with a value for each of `columns`,
    which are positions, or heads. `normalized` is 0 where nothing changes, and 1 where the run becomes the other one.
    """

    point: str
    by: Literal["position", "head"]
    layers: tuple[int, ...]
    columns: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    normalized: tuple[tuple[float | None, ...], ...]

    def best(self, count: int = 5) -> list[tuple[int, int, float]]:
        """The places that bring most of the answer back: layer, column and normalized value, the best first."""
        rows = zip(self.layers, self.normalized, strict=True)
        cells = [(layer, at, value) for layer, row in rows for at, value in zip(self.columns, row, strict=True)]
        known = [(layer, at, value) for layer, at, value in cells if value is not None]
        return sorted(known, key=lambda cell: -cell[2])[:count]


class Patching(Answer):
    """A sweep. `clean` and `corrupted` are the metric of the prompts as they are. Notebooks show it as heatmaps."""

    metric: Literal["logit_difference", "probability", "kl"]
    into: Literal["corrupted", "clean"]
    clean_token_ids: tuple[int, ...]
    corrupted_token_ids: tuple[int, ...]
    clean_texts: tuple[str, ...]
    corrupted_texts: tuple[str, ...]
    clean: float
    corrupted: float
    tables: tuple[PatchingTable, ...]
    seconds: float

    def _repr_svg_(self) -> str:
        return svg([self._heatmap(table) for table in self.tables])

    def _heatmap(self, table: PatchingTable) -> Picture:
        """Blue brings the answer back, red takes it further away."""
        names = [shown(self.clean_texts[at]) if table.by == "position" else f"head {at}" for at in table.columns]
        cells = [
            [None if value is None else Cell(f"{value:.2f}", value, f"layer {layer}: {value:.4f}") for value in row]
            for layer, row in zip(table.layers, table.normalized, strict=True)
        ]
        return heatmap(f"{table.point}, by layer and {table.by}", names, [*map(str, table.layers)], cells)


@dataclass(frozen=True, slots=True)
class Activations:
    """What prompts have inside the model. Not reduced, `tensors` has `{index}.{point}` of `[layers, positions, width]`
    for each prompt; reduced, one `{point}` of `[prompts, layers, width]`. `layers` are the rows of each point's
    tensors, `records` say the positions and tokens of each prompt.
    """

    model: str
    layers: Mapping[str, tuple[int, ...]]
    records: tuple[Mapping[str, Any], ...]
    tensors: Mapping[str, FloatArray] = field(repr=False)


def parse_activations(body: bytes) -> Activations:
    """Read the file that the server sends, or a shard of a job. Raises ValueError if it is not one."""
    tensors, metadata = load(body)
    try:
        about = json.loads(metadata["activations"])
        layers = {point: tuple(rows) for point, rows in about["layers"].items()}
        return Activations(about["model"], layers, tuple(about["records"]), tensors)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the metadata does not tell {error}") from error


def patch(options: Mapping[str, Any]) -> Call[Patching]:
    """Sweep patches of one prompt into another."""
    body = {
        name: list(value) if name in ("layers", "positions", "points") else value for name, value in options.items()
    }
    metric = {name: body.pop(name) for name in ("answer", "wrong") if name in body}
    body["metric"] = {"kind": body.pop("metric"), **metric}
    return Call("POST", "/v1/experiments/patching", Patching.model_validate_json, json=body)


def read_activations(options: Mapping[str, Any]) -> Call[Activations]:
    """Read what prompts have at some points."""
    body = dict(options)
    body["prompts"] = [each if isinstance(each, str) else list(each) for each in body["prompts"]]
    return Call("POST", ACTIVATIONS, parse_activations, json=body)


class _Kept(Answer):
    id: str


@contextmanager
def prompts_file(prompts: ManyPrompts) -> Iterator[Path]:
    """The file of a job. A path is such a file; prompts are written to one that is there in the block.

    Raises `InvalidRequest` if there are none, `OSError`.
    """
    if isinstance(prompts, (str, Path)):
        yield Path(prompts)
        return
    with TemporaryDirectory() as folder:
        path = Path(folder, "prompts.jsonl")
        with path.open("w", encoding="utf-8") as file:
            file.writelines(map(_line, prompts))
        if not path.stat().st_size:
            raise InvalidRequest("a job needs at least one prompt")
        yield path


def _line(prompt: str | Sequence[int] | Mapping[str, Any]) -> str:
    fields = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
    if not isinstance(fields.get("prompt"), str):
        fields["prompt"] = [int(token) for token in fields.get("prompt", ())]
    return json.dumps(fields) + "\n"


def put_prompts() -> Call[str]:
    """`POST /v1/files`: the id of the file that comes along."""
    return Call(
        "POST", "/v1/files", lambda body: _Kept.model_validate_json(body).id, form={"purpose": "user_data"}, file="file"
    )


def start_job(input_file_id: str, options: Mapping[str, Any]) -> Call[ActivationsJobInfo]:
    """`POST /v1/experiments/activations` for a file."""
    body = {"input_file_id": input_file_id} | {
        name: list(value) if name in ("points", "layers") else value for name, value in options.items()
    }
    return Call("POST", ACTIVATIONS, ActivationsJobInfo.model_validate_json, json=body)


def get_job(job: str) -> Call[ActivationsJobInfo]:
    """`GET /v1/experiments/activations/{id}`."""
    return Call("GET", f"{ACTIVATIONS}/{path_part(job)}", ActivationsJobInfo.model_validate_json)


def cancel_job(job: str) -> Call[ActivationsJobInfo]:
    """`POST /v1/experiments/activations/{id}/cancel`."""
    return Call("POST", f"{ACTIVATIONS}/{path_part(job)}/cancel", ActivationsJobInfo.model_validate_json)


def list_jobs(after: str | None) -> Call[ActivationsJobPage]:
    """`GET /v1/experiments/activations`: the page that follows a job, or with None the first."""
    params = {} if after is None else {"after": after}
    return Call("GET", ACTIVATIONS, ActivationsJobPage.model_validate_json, params=params)


def get_file(file_id: str) -> Call[None]:
    """`GET /v1/files/{id}/content`. The answer is a file, not for `parse`."""
    return Call("GET", f"/v1/files/{path_part(file_id)}/content", nothing)


def delete_file(file_id: str) -> Call[None]:
    """`DELETE /v1/files/{id}`."""
    return Call("DELETE", f"/v1/files/{path_part(file_id)}", nothing)


def note_manifest(folder: Path, info: ActivationsJobInfo) -> list[Shard]:
    """Write how a job is into its folder, and tell the shards that are not there.

    Raises `InvalidRequest` if the folder is another job's, and `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    if manifest.exists() and (other := _read_manifest(folder).id) != info.id:
        raise InvalidRequest(f"{folder} has the shards of {other}: take another folder for {info.id}")
    with written_whole(manifest) as file:
        file.write(info.model_dump_json(indent=1).encode())
    return [shard for shard in info.shards if not (folder / shard.name).exists()]  # a file appears when it is whole


def read_activations_folder(folder: str | Path) -> Iterator[Activations]:
    """The shards that `ActivationsJob.download` has written, in the order of the prompts, one in memory at a time.

    Raises `InvalidRequest` for a folder without a manifest, or one whose shards are not all there.
    """
    shards = _read_manifest(Path(folder)).shards
    missing = [shard.name for shard in shards if not Path(folder, shard.name).exists()]
    if missing:
        raise InvalidRequest(f"{folder} lacks {len(missing)} of {len(shards)} shards: download them again")
    for shard in shards:
        yield parse_activations(Path(folder, shard.name).read_bytes())


def _read_manifest(folder: Path) -> ActivationsJobInfo:
    try:
        return ActivationsJobInfo.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder} has no {MANIFEST} of a job: {error}") from error
