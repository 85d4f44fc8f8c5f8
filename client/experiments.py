"""What `Djinn.patching` and `Djinn.activations` answer, and the calls that ask for it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from client.answer import Answer
from client.calls import Call
from client.tensors import FloatArray, load


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

    def _repr_html_(self) -> str:
        return "".join(self._heatmap(table) for table in self.tables)

    def _heatmap(self, table: PatchingTable) -> str:
        names = [self.clean_texts[at] if table.by == "position" else f"head {at}" for at in table.columns]
        head = "".join(f'<th style="white-space:pre">{escape(name)}</th>' for name in names)
        rows = "".join(
            f"<tr><th>{layer}</th>{''.join(map(_cell, row))}</tr>"
            for layer, row in zip(table.layers, table.normalized, strict=True)
        )
        caption = f"<caption>{escape(table.point)}, by layer and {table.by}</caption>"
        return f"<table>{caption}<tr><th></th>{head}</tr>{rows}</table>"


def _cell(value: float | None) -> str:
    """Blue brings the answer back, red takes it further away."""
    if value is None:
        return "<td></td>"
    strength = min(1.0, abs(value))
    color = f"rgba(33,102,172,{strength:.2f})" if value >= 0 else f"rgba(178,24,43,{strength:.2f})"
    return f'<td style="background:{color}" title="{value:.4f}">{value:.2f}</td>'


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
    return Call("POST", "/v1/experiments/activations", parse_activations, json=body)


Prompts = Sequence[str | Sequence[int]]
