"""Traces and jobs of both clients, against Transformers' model of the same weights."""

from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

import client
from client import Djinn
from tests.experiments.test_activations import states
from tests.openai.conftest import openai_url, reference
from tests.openai.reference import Reference

__all__ = ["openai_url", "reference"]
PROMPT = [5, 17, 9, 30, 41, 8]


@pytest.fixture
def server_url(openai_url: str) -> str:
    """The server whose model Transformers has too, in the place of the clients' own."""
    return openai_url


def test_a_trace_saves_and_edits_what_hooks_do(djinn: Djinn, reference: Reference) -> None:
    layers, seen = reference.model.model.layers, list[torch.Tensor]()
    hooks = [layers[1].register_forward_hook(lambda module, args, output: output * 0.5)]
    hooks += [layers[at].register_forward_pre_hook(lambda module, args: seen.append(args[0][0])) for at in (2, 3)]
    with torch.inference_mode():
        expected = reference.model(torch.tensor([PROMPT]))
    for hook in hooks:
        hook.remove()
    with djinn.sessions.create() as session:
        with session.trace(token_ids=PROMPT) as trace:
            before = trace["resid_post", 1].save()
            trace["resid_post", 1].edit(scale=0.5)
            streams = [trace["resid_post", layer].save() for layer in (1, 2)]
            pattern = trace["blocks.2.attn.hook_pattern"].save(heads=[1])
            last = trace["logits"].save(position=len(PROMPT) - 1)
            with pytest.raises(client.InvalidRequest, match="once the block"):
                _ = last.value
        assert (trace.turn.token_ids, trace.turn.usage.prompt_tokens) == ((), len(PROMPT))
        for saved, wanted in zip(streams, seen, strict=True):
            np.testing.assert_allclose(saved, wanted, atol=1e-4)
        np.testing.assert_array_equal(before, 2 * streams[0].value)
        np.testing.assert_allclose(last.value, expected.logits[0, -1:], atol=1e-4)
        assert (last.positions, last.token_ids) == ((5,), (8,))
        assert pattern.value.shape == (6, 1, 6)
        np.testing.assert_allclose(pattern.value.sum(-1), 1, atol=1e-5)
        assert (session.breakpoints(), session.captures().records) == ([], ())
        with pytest.raises(client.InvalidRequest, match="begin another"):
            trace["resid_post", 1].edit(scale=0.5)


def test_a_trace_of_several_passes_is_one_value_and_leaves_what_is_not_its_own(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        session.capture_at(layer=0)
        with session.trace(token_ids=PROMPT, max_tokens=3, ignore_eos=True) as trace:
            pattern, state = trace["pattern", 2].save(), trace["resid_post", 0].save(when_pass="decode")
            nothing = trace["resid_post", 0].save(position=100)
        assert (pattern.positions, state.positions) == (tuple(range(8)), (6, 7))
        assert pattern.value.shape == (8, 4, 8)
        np.testing.assert_allclose(pattern.value.sum(-1), 1, atol=1e-5)
        assert state.token_ids == trace.turn.token_ids[:2]
        with pytest.raises(client.InvalidRequest, match="no position"):
            _ = nothing.value
        assert len(session.breakpoints()) == 1
        assert session.captures().records

        def ask_for_a_head_that_is_not_there() -> None:
            with session.trace(token_ids=PROMPT) as wrong:
                wrong["resid_post", 0].save()
                wrong["z", 0].edit(ablate=True, heads=[9])

        with pytest.raises(client.Unprocessable):
            ask_for_a_head_that_is_not_there()
        assert (len(session.breakpoints()), session.refresh().tokens) == (1, 9)


def test_a_job_is_downloaded_as_it_goes_and_only_what_is_missing(
    djinn: Djinn, reference: Reference, tmp_path: Path
) -> None:
    prompts: list[Any] = ["a cat", np.array(PROMPT), {"prompt": "x", "id": "third"}, "long " * 900]
    job = djinn.activation_jobs.start(prompts, layers=[0, 2], prompts_per_shard=2)
    done = job.download(tmp_path / "read", every_s=0.05)
    assert (done.status, done.prompt_counts.completed, done.prompt_counts.failed) == ("completed", 3, 1)
    first, second = client.read_activations_folder(tmp_path / "read")
    assert (second.records[0]["id"], "error" in second.records[1]) == ("third", True)
    for read, index, prompt in ((first, 0, "a cat"), (first, 1, PROMPT), (second, 2, "x")):
        np.testing.assert_allclose(read.tensors[f"{index}.resid_post"], states(reference, prompt)[[0, 2]], atol=1e-4)
    [*shards] = sorted((tmp_path / "read").glob("*.safetensors"))
    before = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    with pytest.raises(client.InvalidRequest, match="1 of 2"):
        list(client.read_activations_folder(tmp_path / "read"))
    found = djinn.activation_jobs.get(job.id)
    found.download(tmp_path / "read")
    assert (shards[0].stat().st_mtime_ns, len(list(client.read_activations_folder(tmp_path / "read")))) == (before, 2)
    assert job.id in [each.id for each in djinn.activation_jobs.list()]
    found.delete_files()
    with pytest.raises(client.NotFound):
        found.download(tmp_path / "again")


def test_a_job_that_fails_says_which_line(djinn: Djinn, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": 5}\n')
    job = djinn.activation_jobs.start(path)
    with pytest.raises(client.JobFailed, match="line 2") as failed:
        job.wait(every_s=0.05)
    assert (failed.value.info.errors[0].line, job.info.status) == (2, "failed")
    with pytest.raises(client.Conflict):
        job.cancel()
    other = djinn.activation_jobs.start(["x"])
    other.download(tmp_path / "folder", every_s=0.05)
    with pytest.raises(client.InvalidRequest, match="another folder"):
        job.download(tmp_path / "folder")
    with pytest.raises(client.InvalidRequest, match="at least one"):
        djinn.activation_jobs.start([])


def test_notebooks_get_pictures(djinn: Djinn) -> None:
    with djinn.sessions.create(metadata={"name": "a <b> & \x01"}) as session:
        session.capture_at(layers=[0, 2])
        session.capture_at(layer=1, point="pattern", heads=[2])
        session.generate(token_ids=PROMPT, max_tokens=0)
        [pattern] = session.captures(point="pattern").records
        session.break_at(layer=1)
        assert session.generate(prompt="x", max_tokens=0).status == "paused"
        swept = djinn.patching(PROMPT, [6, *PROMPT[1:]], metric="kl", positions=[0, 3])
        session.refresh()
        pictures: list[Any] = [session, session.lens_map(positions=(0, 6)), pattern, swept]
        drawn = [ElementTree.fromstring(each._repr_svg_()) for each in pictures]
        words = ["\n".join(element.text or "" for element in root.iter()) for root in drawn]
        assert {"name: a <b> & \ufffd", "paused at resid_post of layer 1, positions 6 to 6"} <= {*words[0].split("\n")}
        assert [len(root.findall(".//{*}title")) for root in drawn] == [0, 2 * 6, 0, 4 * 2]
        assert session.captures(layer=0).records[0]._repr_svg_() is None
        page = urlsplit(session.explain())
        assert httpx.get(page._replace(fragment="").geturl()).is_success
        assert page.fragment == f"/sessions/{session.id}/model"
    [image] = drawn[2].findall(".//{*}image")
    pixels = Image.open(BytesIO(b64decode(image.attrib["href"].partition(",")[2]))).convert("RGB")
    np.testing.assert_allclose(255 - np.asarray(pixels)[..., 0], pattern.activation[:, 0] * (255 - 33), atol=1)
