"""`/v1/experiments/patching`, against hooks on Transformers' model of the same weights."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load
from torch import Tensor

from app.domain.values import SamplingParams, StopRule
from app.experiments.patching import PatchingBody, Sweep
from app.logs import REQUEST
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule
from tests.described_events import check_stream
from tests.errors import assert_error
from tests.openai.reference import Reference
from tests.serving import running_services

LAYERS = 4
RUNS = {"clean": [5, 17, 9, 30, 41, 8], "corrupted": [5, 17, 12, 30, 44, 8]}
ANSWER, WRONG = 21, 60
PATH = "/v1/experiments/patching"

SITES: dict[str, tuple[str, bool]] = {
    "resid_pre": ("", True),
    "q": ("self_attn.q_proj", False),
    "v": ("self_attn.v_proj", False),
    "z": ("self_attn.o_proj", True),
    "attn_out": ("self_attn.o_proj", False),
    "mlp_in": ("mlp.gate_proj", True),
    "mlp_post": ("mlp.down_proj", True),
    "mlp_out": ("mlp.down_proj", False),
    "resid_post": ("", False),
}
"""Where in a layer Transformers has each point: a module, and whether it is what that takes."""


def hooked(
    reference: Reference, token_ids: list[int], layer: int, change: Callable[[Tensor], None], point: str = "resid_post"
) -> Tensor:
    """The last position's logits where what stands at a point, `[positions, width]`, is changed in place."""
    path, is_input = SITES[point]
    module = reference.model.model.layers[layer].get_submodule(path)

    def before(module: Any, inputs: Any) -> None:
        change(inputs[0][0])

    def after(module: Any, inputs: Any, output: Any) -> None:
        change((output[0] if isinstance(output, tuple) else output)[0])

    handle = module.register_forward_pre_hook(before) if is_input else module.register_forward_hook(after)
    try:
        with torch.inference_mode():
            logits: Tensor = reference.model(torch.tensor([token_ids])).logits[0, -1]
            return logits
    finally:
        handle.remove()


MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "logit_difference": lambda logits, clean: float(logits[ANSWER] - logits[WRONG]),
    "probability": lambda logits, clean: float(logits.softmax(-1)[ANSWER]),
    "kl": lambda logits, clean: float(
        torch.nn.functional.kl_div(logits.log_softmax(-1), clean.log_softmax(-1), log_target=True, reduction="sum")
    ),
}
METRICS: dict[str, dict[str, Any]] = {
    "logit_difference": {"kind": "logit_difference", "answer": ANSWER, "wrong": WRONG},
    "probability": {"kind": "probability", "answer": ANSWER},
    "kl": {"kind": "kl"},
}


CASES = [
    *((point, "position", "logit_difference", "corrupted") for point in SITES),
    *((point, "head", "logit_difference", "corrupted") for point in ("q", "v", "z")),
    *(("resid_post", "position", kind, into) for kind in MEASURES for into in RUNS),
]


@pytest.mark.parametrize(("point", "by", "kind", "into"), CASES)
def test_each_place_gives_what_a_hook_gives(
    http: httpx.Client, reference: Reference, point: str, by: str, kind: str, into: str
) -> None:
    body = {**RUNS, "metric": METRICS[kind], "points": [point], "layers": [1, 3], "by": by, "into": into}
    answer = http.post(PATH, json=body | ({"positions": [4, 2, 4]} if by == "head" else {})).raise_for_status().json()
    plain = {name: hooked(reference, ids, 0, lambda found: None) for name, ids in RUNS.items()}
    measured = {name: MEASURES[kind](logits, plain["clean"]) for name, logits in plain.items()}
    [source] = RUNS.keys() - {into}
    [table] = answer["tables"]
    assert (answer["clean"], answer["corrupted"]) == pytest.approx((measured["clean"], measured["corrupted"]), abs=1e-4)
    config = reference.model.config
    heads = 1 if by == "position" else config.num_key_value_heads if point == "v" else config.num_attention_heads
    assert (table["layers"], table["columns"]) == ([1, 3], [2, 3, 4, 5] if by == "position" else list(range(heads)))
    wanted = np.zeros((2, len(table["columns"])))
    for row, layer in enumerate(table["layers"]):
        kept: list[Tensor] = []
        hooked(reference, RUNS[source], layer, lambda found, to=kept: to.append(found.clone()), point)  # type: ignore[misc]
        for column, chosen in enumerate(table["columns"]):

            def patch(found: Tensor, other: Tensor = kept[0], chosen: int = chosen) -> None:
                positions, width = [chosen] if by == "position" else [2, 4], found.shape[-1] // heads
                part = slice(None) if by == "position" else slice(chosen * width, (chosen + 1) * width)
                found[positions, part] = other[positions, part]

            wanted[row, column] = MEASURES[kind](hooked(reference, RUNS[into], layer, patch, point), plain["clean"])
    np.testing.assert_allclose(table["values"], wanted, atol=1e-4)
    spread = measured[source] - measured[into]
    np.testing.assert_allclose(table["normalized"], (wanted - measured[into]) / spread, atol=1e-3)


async def test_beside_a_client_rows_of_a_layer_are_under_way_and_then_none_for_longer() -> None:
    async with running_services() as services, AsyncExitStack() as cleanup:
        REQUEST.set({"state": {"is_background": True}})
        sweep = Sweep(services.sessions, services.places, services.tokens, None)
        sweep.check(PatchingBody.model_validate({**RUNS, "metric": {"kind": "kl"}}))
        REQUEST.set(None)
        client = await cleanup.enter_async_context(services.sessions.ephemeral())
        asked = TurnRequest([5, 6, 7], SamplingParams(seed=0), StopRule(max_tokens=400), TextRule())
        services.sessions.turns.start(client, asked, cleanup)
        REQUEST.set({"state": {"is_background": True}})

        async def run() -> int:
            return sum([1 async for _ in sweep.run()])

        running, spent, began = asyncio.create_task(run()), defaultdict[int, float](float), time.monotonic()
        while client.under_way:
            await asyncio.sleep(0.001)
            now, rows = time.monotonic(), sum(each.background and each.under_way for each in services.sessions.table)
            spent[rows] += now - began
            began = now
            assert services.sessions.table.page(limit=9) == [client], "no list has those of experiments"
        assert max(spent) == 4
        assert spent[0] > sum(spent.values()) / 2
        assert await running == 1 + LAYERS * 4


def test_rows_stream_and_the_file_has_the_same_numbers(http: httpx.Client) -> None:
    def told(name: str) -> int:
        return sum(each[name] for each in http.get("/v1/activity").json()["minutes"])

    turns, agents = told("turns"), told("agents")
    body = {"clean": "a cat", "corrupted": "a dog", "metric": {"kind": "probability", "answer": "x"}}
    streamed = http.post(PATH, json={**body, "stream": True}).raise_for_status()
    events = check_stream(http.get("/openapi.json").json(), PATH, streamed.content)
    started, *rows, finished = [(each["event"], json.loads(each["data"])) for each in events]
    assert (started[0], finished[0], {name for name, _ in rows}) == ("started", "finished", {"row"})
    assert started[1]["rows"] == len(rows) == LAYERS * 3
    [table] = finished[1]["tables"]
    at = {(row["layer"], row["column"]): row["value"] for _, row in rows}
    assert table["values"] == [[at[layer, column] for column in table["columns"]] for layer in table["layers"]]
    file = http.post(PATH, json=body, headers={"accept": "application/octet-stream"}).raise_for_status().content
    np.testing.assert_allclose(load(file)["resid_post"], np.array(table["values"], "<f4"))
    assert not http.get("/v1/memory").json()["sessions"]
    assert (told("turns") > turns, told("agents")) == (True, agents), "places are work, and no agents"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"corrupted": RUNS["clean"]}, "corrupted"),
        ({"corrupted": [5]}, "corrupted"),
        ({"positions": [6]}, "positions"),
        ({"points": ["resid"]}, "points.0"),
        ({"points": ["pattern"]}, "points"),
        ({"points": ["logits"]}, "points"),
        ({"points": ["mlp_out"], "by": "head"}, "by"),
        ({"layers": [LAYERS]}, "layers"),
        ({"metric": {"kind": "kl", "answer": 5}}, "metric.answer"),
        ({"metric": {"answer": 5}}, "metric.wrong"),
        ({"metric": {"kind": "probability", "answer": "two tokens"}}, "metric.answer"),
        ({"metric": {"kind": "probability", "answer": 100_000}}, "metric.answer"),
    ],
    ids=str,
)
def test_what_cannot_be_patched_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(PATH, json={**RUNS, "metric": METRICS["logit_difference"], **fields})
    assert_error(answer, 422, "field_out_of_range", param=param)
