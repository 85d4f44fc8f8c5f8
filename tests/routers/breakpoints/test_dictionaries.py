"""Dictionaries: uploaded as SAELens and Gemma Scope write them, read and edited as SAELens does, else refused."""

import io
import json
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, load_file, save
from safetensors.torch import save as save_torch

from tests.durability.restarting import serving
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import (
    CONTEXT,
    HIDDEN,
    TURN,
    arm,
    edit,
    generate,
    open_session,
    pause,
    read,
    resume,
)
from tests.waiting import wait_until

with warnings.catch_warnings(action="ignore"):
    saes = pytest.importorskip("sae_lens", reason="make setup-dev installs it")
    about = pytest.importorskip("sae_lens.saes.sae").SAEMetadata

pytestmark = pytest.mark.dev
FEATURES = 256
HOOK = "blocks.2.hook_resid_pre"
"""What comes out of layer 1."""
KINDS: dict[str, Callable[[], Any]] = {
    "standard": lambda: saes.StandardSAE(saes.StandardSAEConfig(HIDDEN, FEATURES)),
    "without b_dec": lambda: saes.StandardSAE(saes.StandardSAEConfig(HIDDEN, FEATURES, apply_b_dec_to_input=False)),
    "jumprelu": lambda: saes.JumpReLUSAE(saes.JumpReLUSAEConfig(HIDDEN, FEATURES)),
    "gated": lambda: saes.GatedSAE(saes.GatedSAEConfig(HIDDEN, FEATURES)),
    "topk": lambda: saes.TopKSAE(saes.TopKSAEConfig(HIDDEN, FEATURES, k=7)),
    "topk by decoder": lambda: saes.TopKSAE(
        saes.TopKSAEConfig(HIDDEN, FEATURES, k=7, rescale_acts_by_decoder_norm=True)
    ),
    "transcoder": lambda: saes.Transcoder(
        saes.TranscoderConfig(HIDDEN, FEATURES, d_out=HIDDEN, apply_b_dec_to_input=False)
    ),
}


def make(kind: str, hook: str = HOOK, **metadata: Any) -> Any:
    """An autoencoder whose tensors are all drawn at random, so that each of them counts."""
    torch.manual_seed(7)
    sae = KINDS[kind]()
    for name, tensor in sae.named_parameters():
        tensor.data.normal_(std=0.3 if name.startswith("W") else 0.1)
        if name == "threshold":
            tensor.data.abs_().add_(0.5)
    sae.cfg.metadata = about(hook_name=hook, neuronpedia_id="tiny/1-res", **metadata)
    return sae.eval()


def upload(http: httpx.Client, folder: Path, **fields: Any) -> httpx.Response:
    names = {"cfg": "cfg.json", "weights": "sae_weights.safetensors"}
    files = {name: (folder / path).read_bytes() for name, path in names.items() if (folder / path).exists()}
    return http.post("/v1/dictionaries", data={"name": "tiny", **fields}, files=files)


def captured(http: httpx.Client, session: str) -> NDArray[np.float32]:
    return np.concatenate([each for _, each in sorted(load(http.get(f"{session}/captures").content).items())])


def metadata_of(file: bytes) -> dict[str, str]:
    length = int.from_bytes(file[:8], "little")
    found: dict[str, str] = json.loads(file[8 : 8 + length])["__metadata__"]
    return found


@pytest.fixture(autouse=True)
def nothing_left(http: httpx.Client) -> Iterator[None]:
    yield
    for each in http.get("/v1/sessions").json()["data"]:  # what they were edited through is kept for them
        http.delete(f"/v1/sessions/{each['id']}")
    http.delete("/v1/dictionaries/tiny")


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_saelens(http: httpx.Client, tmp_path: Path, kind: str) -> None:
    sae, session = make(kind), open_session(http)
    sae.save_model(tmp_path)
    shown = upload(http, tmp_path).raise_for_status().json()
    assert (shown["layer"], shown["point"], shown["features"]) == (1, "resid_post", FEATURES)
    assert http.get("/v1/dictionaries").json() == {"data": [shown]}
    arm(http, session, action="capture")
    generate(http, session)
    hidden = captured(http, session)
    wanted = sae.encode(torch.from_numpy(hidden)).detach()
    query: dict[str, Any] = {"dictionary": "tiny", "positions": "all", "top_k": 5, "features": "3,250"}
    far = http.get(f"{session}/features", params={**query, "features": "0:999999999"})
    assert_error(far, 422, "field_out_of_range", param="features")
    found = http.get(f"{session}/features", params=query).raise_for_status().json()
    assert found["url"] == "https://www.neuronpedia.org/tiny/1-res/{feature}"
    assert len(found["positions"]) == len(hidden)
    assert wanted.count_nonzero() > 5 * len(hidden), "most positions have something to tell"
    for at, row in zip(found["positions"], wanted, strict=True):
        best = row.topk(5)
        assert [each["index"] for each in at["top"]] == best.indices[best.values > 0].tolist()
        assert [each["activation"] for each in at["top"]] == pytest.approx(best.values[best.values > 0].tolist(), 1e-4)
        assert [each["activation"] for each in at["chosen"]] == pytest.approx(row[[3, 250]].tolist(), 1e-4, 1e-5)


@pytest.mark.parametrize("kind", ["standard", "jumprelu", "gated", "topk"])
def test_an_edit_changes_what_a_feature_writes_and_nothing_else(http: httpx.Client, tmp_path: Path, kind: str) -> None:
    sae, plain, session = make(kind), open_session(http), open_session(http)
    sae.save_model(tmp_path)
    upload(http, tmp_path).raise_for_status()
    pause(http, plain)
    hidden = torch.from_numpy(read(http, plain).copy())
    active = sae.encode(hidden).detach()
    index = int(active.amin(0).argmax()) if kind == "standard" else int(active.amax(0).argmax())
    feature = {"dictionary": "tiny", "index": index}
    aims = {"scale": active * -2.5, "clamp": torch.full_like(active, 4.0), "ablate": torch.zeros_like(active)}
    for op, aim in aims.items():  # x + (new - act) W_dec, as SAELens' own tutorials and `use_error_term` have it
        changed = active.clone()
        changed[:, index] = aim[:, index]
        wanted = sae.decode(changed).detach() + (hidden - sae.decode(active).detach())
        factor = {"factor": -2.5 if op == "scale" else 4.0} if op != "ablate" else {}
        fork = f"/v1/sessions/{http.post(f'{plain}/fork').raise_for_status().json()['id']}"
        edit(http, fork, {"op": op, "feature": feature, **factor}).raise_for_status()
        assert torch.allclose(torch.from_numpy(read(http, fork).copy()), wanted, atol=1e-4), op
        http.delete(fork)
    bound = float((active[:, index].amax() + active[:, index].amin()) / 2)
    when = {"feature": feature, "above": bound}
    arm(http, session, action="edit", edits=[{"op": "add", "feature": feature, "factor": 3, "when": when}])
    arm(http, session, action="capture")
    generate(http, session)
    holds = (active[:, index] > bound).float()[:, None]
    wanted = hidden + 3 * holds * sae.W_dec[index].detach()
    assert 0 < holds.sum() < len(holds)
    assert np.allclose(captured(http, session)[: len(hidden)], wanted, atol=1e-4)
    if kind == "topk":  # whether a feature is active follows from the whole dictionary
        assert_error(http.delete("/v1/dictionaries/tiny"), 409, "upload_in_use")
        make("jumprelu").save_model(tmp_path)
        assert_error(upload(http, tmp_path), 409, "upload_in_use")
        http.delete(f"{session}/breakpoints").raise_for_status()
        assert_error(http.delete("/v1/dictionaries/tiny"), 409, "upload_in_use")  # the history still is
    http.delete(session).raise_for_status()
    http.delete("/v1/dictionaries/tiny").raise_for_status()


def test_an_edit_through_a_transcoder_reads_one_point_and_changes_another(http: httpx.Client, tmp_path: Path) -> None:
    sae, plain, session = make("transcoder", "blocks.1.ln2.hook_normalized"), open_session(http), open_session(http)
    sae.cfg.metadata.hook_name_out = "blocks.1.hook_mlp_out"
    sae.save_model(tmp_path)
    upload(http, tmp_path).raise_for_status()
    for point in ("mlp_in", "mlp_out"):
        arm(http, plain, action="capture", point=point)
    generate(http, plain, max_tokens=0)
    given = {
        point: load(http.get(f"{plain}/captures", params={"point": point}).content) for point in ("mlp_in", "mlp_out")
    }
    read_there, written = (torch.from_numpy(next(iter(each.values())).copy()) for each in given.values())
    active = sae.encode(read_there).detach()
    index = int(active.amin(0).argmax())
    edit_of = {"op": "clamp", "feature": {"dictionary": "tiny", "index": index}, "factor": 5}
    arm(http, session, action="edit", point="mlp_out", edits=[edit_of])
    arm(http, session, action="pause", point="mlp_in")
    arm(http, session, action="capture", point="mlp_out")
    assert generate(http, session, max_tokens=0)["status"] == "paused"
    assert resume(http, session)["status"] == "finished"
    wanted = written + (5 - active[:, index, None]) * sae.W_dec[index].detach()
    assert np.allclose(captured(http, session), wanted, atol=1e-4)
    pause(http, plain, point="mlp_out")
    assert_error(edit(http, plain, edit_of), 422, "field_out_of_range", param="edits.0.feature")


def test_features_are_told_beside_the_tokens_of_each_api(http: httpx.Client, tmp_path: Path) -> None:
    sae, session = make("topk"), open_session(http)
    sae.save_model(tmp_path)
    upload(http, tmp_path).raise_for_status()
    arm(http, session, action="capture")
    asked = {"action": "features", "features": {"dictionary": "tiny", "top_k": 4}}
    armed = http.post(f"{session}/breakpoints", json=asked).raise_for_status().json()
    assert (armed["layers"], armed["point"], armed["features"]["top_k"]) == ([1], "resid_post", 4)
    with httpx.stream("POST", f"{http.base_url}{session}/generate", json={**TURN, "stream": True}) as answer:
        lines = [line.partition(": ")[2] for line in answer.iter_lines() if line]
    told = [json.loads(data) for event, data in zip(lines[::2], lines[1::2], strict=True) if event == "features"]
    assert json.loads(lines[-1])["features"] == told
    hidden = torch.from_numpy(captured(http, session))
    assert [position for each in told for position in each["positions"]] == list(range(len(hidden)))
    for found, row in zip((top for each in told for top in each["top"]), sae.encode(hidden).detach(), strict=True):
        best = row.topk(4)
        assert [each["index"] for each in found] == best.indices.tolist()
        assert [each["activation"] for each in found] == pytest.approx(best.values.tolist(), 1e-4)
    assert_error(http.delete("/v1/dictionaries/tiny"), 409, "upload_in_use")
    headers = {"X-Session-ID": session.rpartition("/")[2]}
    common = {"model": "tiny-llama", "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    calls = {
        "completions": {"prompt": [5, 6, 7], "max_tokens": 2},
        "chat/completions": chat,
        "messages": chat,
        "responses": {"input": "a", "max_output_tokens": 2, "store": False},
    }
    for path, call in calls.items():
        whole = http.post(f"/v1/{path}", json={**common, **call}, headers=headers).raise_for_status().json()
        assert whole["djinn"]["features"][-1]["dictionary"] == "tiny", path
        streamed = http.post(f"/v1/{path}", json={**common, **call, "stream": True}, headers=headers)
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        pieces = [each["djinn"]["features"] for each in events if "features" in each.get("djinn", {})]
        assert len(pieces[0][0]["top"]) > 1 or pieces[0][0]["positions"], path
    http.delete(session).raise_for_status()


def test_experiments_reduce_prompts_to_features(http: httpx.Client, tmp_path: Path) -> None:
    sae = make("jumprelu")
    sae.save_model(tmp_path)
    upload(http, tmp_path).raise_for_status()
    path, prompts, features = "/v1/experiments/activations", [[5, 6, 7], [9, 30]], {"dictionary": "tiny", "top_k": 3}
    plain = load(http.post(path, json={"prompts": prompts, "layers": [1]}).raise_for_status().content)
    read_whole = http.post(path, json={"prompts": prompts, "features": features}).raise_for_status().content
    found, wanted = (
        load(read_whole),
        [sae.encode(torch.from_numpy(plain[f"{n}.resid_post"][0])).detach() for n in (0, 1)],
    )
    for number, active in enumerate(wanted):
        best = active.topk(3)
        assert np.allclose(found[f"{number}.activations"], best.values, rtol=1e-4)
        assert np.array_equal(found[f"{number}.features"], np.where(best.values > 0, best.indices, -1))
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts * 300)
    file = http.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "user_data"}).json()["id"]
    asked = {"input_file_id": file, "features": features, "reduce": "last", "prompts_per_shard": 300}
    job = http.post(path, json=asked).raise_for_status().json()
    assert job["features"]["dictionary"] == "tiny"
    assert_error(http.delete("/v1/dictionaries/tiny"), 409, "upload_in_use", param="name")
    wait_until(lambda: http.get(f"{path}/{job['id']}").json()["status"] == "completed")
    shards = http.get(f"{path}/{job['id']}").json()["shards"]
    last = load(http.get(f"/v1/files/{shards[-1]['file_id']}/content").content)
    assert last["features"].shape == (300, 3)
    assert np.array_equal(last["features"][-1], found["1.features"][-1])
    for wrong, param in (({"reduce": "mean"}, "reduce"), ({"layers": [1]}, "layers")):
        refused = http.post(path, json={"prompts": prompts, "features": features, **wrong})
        assert_error(refused, 422, "field_out_of_range", param=param)


@pytest.mark.parametrize("kind", ["jumprelu", "topk", "probe"])
def test_a_breakpoint_waits_for_a_value(http: httpx.Client, tmp_path: Path, kind: str) -> None:
    whole, session, paused = open_session(http), open_session(http), open_session(http)
    arm(http, whole, action="capture")
    said = generate(http, whole, ignore_eos=True, max_tokens=12)["token_ids"]
    hidden = torch.from_numpy(captured(http, whole))
    if kind == "probe":
        probe = torch.nn.Linear(HIDDEN, 1)
        form = {"name": "gate", "layer": 1}
        http.post("/v1/probes", data=form, files={"weights": save_torch(probe.state_dict())}).raise_for_status()
        values = probe(hidden).sigmoid().detach()[:, 0]
        name: Any = {"probe": "gate"}
    else:
        sae = make(kind)
        sae.save_model(tmp_path)
        upload(http, tmp_path).raise_for_status()
        active = sae.encode(hidden).detach()
        index = int(active[CONTEXT:].amax(0).argmax())
        values, name = active[:, index], {"feature": {"dictionary": "tiny", "index": index}}
    bound = float(values[CONTEXT:].amax() + max(values[CONTEXT:].amin(), 0.01)) / 2
    when = {**name, "above": bound}
    arm(http, session, action="capture", when=when)
    generate(http, session, ignore_eos=True, max_tokens=12)
    held = (values > bound).nonzero()[:, 0].tolist()
    assert 0 < len(held) < len(values)
    file = http.get(f"{session}/captures").content
    about = [json.loads(each) for key, each in sorted(metadata_of(file).items()) if key != "dropped"]
    assert [position for each in about for position in each["positions"]] == held
    assert np.allclose(captured(http, session), hidden[held], atol=1e-5)
    guard = arm(http, paused, when={**when, "pass": "decode"}, once=True, layer=1)
    turn = generate(http, paused, ignore_eos=True, max_tokens=12)
    first = next(position for position in held if position >= CONTEXT)
    where = turn["checkpoint"]
    assert (turn["status"], where["first"], where["breakpoint"]) == ("paused", first, guard["id"])
    assert np.allclose(read(http, paused), hidden[first], atol=1e-5)
    assert http.get(f"{paused}/breakpoints").json() == {"data": []}
    assert resume(http, paused)["token_ids"] == said
    http.delete("/v1/probes/gate")


def test_gemma_scopes_arrays_and_a_stream_without_its_mean(http: httpx.Client, tmp_path: Path) -> None:
    sae, session = make("jumprelu"), open_session(http)
    sae.cfg.apply_b_dec_to_input = False  # as in Gemma Scope
    np.savez(tmp_path / "sae_weights.safetensors.npz", **{k: v.detach().numpy() for k, v in sae.named_parameters()})
    (tmp_path / "sae_weights.safetensors.npz").rename(tmp_path / "sae_weights.safetensors")
    assert_error(upload(http, tmp_path), 422, "field_out_of_range", param="layer")
    pause(http, session)
    hidden = torch.from_numpy(read(http, session).copy())
    ask = partial(http.get, f"{session}/features", params={"dictionary": "tiny", "features": "0:64", "top_k": 0})
    upload(http, tmp_path, layer=1).raise_for_status()
    scope = [each["activation"] for each in ask().json()["positions"][0]["chosen"]]
    assert scope == pytest.approx(sae.encode(hidden)[-1, :64].tolist(), 1e-4, 1e-5)
    centred = make("standard", model_from_pretrained_kwargs={"center_writing_weights": True})
    centred.save_model(tmp_path)
    upload(http, tmp_path).raise_for_status()
    wanted = centred.encode(hidden - hidden.mean(-1, keepdim=True))[-1, :64]
    assert [each["activation"] for each in ask().json()["positions"][0]["chosen"]] == pytest.approx(
        wanted.tolist(), 1e-4, 1e-5
    )


@pytest.mark.parametrize(
    ("config", "tensors", "param"),
    [
        ({"d_in": 63}, {}, "cfg.d_in"),
        ({"architecture": "temporal"}, {}, "cfg.architecture"),
        ({"normalize_activations": "layer_norm"}, {}, "cfg.normalize_activations"),
        ({"metadata": {"hook_name": "blocks.9.hook_resid_post"}}, {}, "cfg.hook_name"),
        ({"metadata": {"hook_name": "blocks.1.attn.hook_pattern"}}, {}, "cfg.hook_name"),
        ({}, {"W_enc": np.zeros((HIDDEN, 5), np.float32)}, "weights.W_enc"),
        ({}, {"b_enc": None}, "weights.b_enc"),
        ({}, {"b_dec": np.full(HIDDEN, np.nan, np.float32)}, "weights.b_dec"),
        ({"architecture": "topk", "k": 257}, {}, "cfg.k"),
        ({}, {"W_enc": np.full((HIDDEN, FEATURES), 1e30, "f4"), "b_dec": np.full(HIDDEN, 1e30, "f4")}, "weights"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    http: httpx.Client, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], param: str
) -> None:
    make("standard").save_model(tmp_path)
    path = tmp_path / "sae_weights.safetensors"
    changed = {**load_file(path), **tensors}
    path.write_bytes(save({name: each for name, each in changed.items() if each is not None}))
    said = json.loads((tmp_path / "cfg.json").read_text())
    (tmp_path / "cfg.json").write_text(json.dumps({**said, **config}))
    assert_error(upload(http, tmp_path), 422, "field_out_of_range", param=param)
    (tmp_path / "cfg.json").write_text(json.dumps(said))
    assert_error(upload(http, tmp_path, layer=3), 422, "field_out_of_range", param="layer")
    assert http.get("/v1/dictionaries").json() == {"data": []}


@pytest.mark.parametrize(
    "header", [f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 50},)}}", "{'descr': ("]
)
def test_a_crafted_archive_is_refused(http: httpx.Client, header: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("W_enc.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    fields = {"name": "tiny", "layer": 1}
    refused = http.post("/v1/dictionaries", data=fields, files={"weights": packed.getvalue()})
    assert_error(refused, 400, "malformed_request", param="weights")
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("readme.txt", b"no array")
    refused = http.post("/v1/dictionaries", data=fields, files={"weights": packed.getvalue()})
    assert_error(refused, 422, "field_out_of_range", param="weights.readme.txt")


def test_dictionaries_survive_a_restart_within_a_budget(tmp_path: Path) -> None:
    make("standard").save_model(tmp_path / "sae")
    folder, room = tmp_path / "state", 400_000  # one has 136,000 bytes
    with serving(folder, max_upload_bytes=room) as http:
        for name in ("a", "b"):
            sae = make("standard")
            sae.b_enc.data[0] = len(name) + ord(name)  # other bytes
            sae.save_model(tmp_path / "sae")
            shown = upload(http, tmp_path / "sae", name=name).raise_for_status().json()
        assert_error(upload(http, tmp_path / "sae", name="c"), 422, "uploads_full")
        http.delete("/v1/dictionaries/a").raise_for_status()
        assert len(list((folder / "uploads").iterdir())) == 1
    with serving(folder, max_upload_bytes=room) as http:
        assert http.get("/v1/dictionaries").json() == {"data": [shown]}
        session = open_session(http)
        pause(http, session)
        query: dict[str, Any] = {"dictionary": "b", "top_k": 1}
        (last,) = http.get(f"{session}/features", params=query).raise_for_status().json()["positions"]
        assert last["top"][0]["index"] == 0, "the feature whose bias is large"
