"""Responses survive `kill -9` in the middle of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.openai.responses.asking import CALLING, GREEDY, LOOK_UP, output_of
from tests.processes import ServerProcess, serve_process

pytestmark = pytest.mark.long

MODEL = "tiny-llama"
ASKED: Any = {**GREEDY, "model": MODEL}


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[ServerProcess, Any]]:
    with (
        serve_process(folder, *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as sdk,
    ):
        yield server, sdk


def test_a_conversation_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with serving(folder) as (server, sdk):
        first = sdk.responses.create(**ASKED, input="One")
        second = sdk.responses.create(**ASKED, input="Two", previous_response_id=first.id)
        branch = sdk.responses.create(**ASKED, input="Other", previous_response_id=first.id)
        deleted = sdk.responses.create(**ASKED, input="Gone")
        calling = sdk.responses.create(**{**CALLING, "model": MODEL}, input="Look it up")
        sdk.responses.delete(deleted.id)
        sdk.responses.delete(first.id)
        expected = sdk.responses.create(**ASKED, input="Three", previous_response_id=second.id, store=False)
        asked_by_branch = sdk.responses.create(**ASKED, input="Three", previous_response_id=branch.id, store=False)
        running = sdk.responses.create(model=MODEL, input="x", stream=True, extra_body={"ignore_eos": True})
        created = next(iter(running)).response
        server.kill()
        running.close()
    with serving(folder) as (server, sdk):
        assert sdk.responses.retrieve(second.id) == second
        for gone in (deleted, first, created):
            with pytest.raises(openai.NotFoundError):
                sdk.responses.retrieve(gone.id)
        third = sdk.responses.create(**ASKED, input="Three", previous_response_id=second.id)
        assert third.output_text == expected.output_text
        other = sdk.responses.create(**ASKED, input="Three", previous_response_id=branch.id)
        assert other.output_text == asked_by_branch.output_text
        output = output_of(calling.output[0].call_id)
        asked: Any = {**ASKED, "tools": [LOOK_UP], "tool_choice": "none"}
        answered = sdk.responses.create(**asked, input=[output], previous_response_id=calling.id)
        assert answered.usage.input_tokens > calling.usage.input_tokens
        server.kill()
    with serving(folder) as (_, sdk):
        assert sdk.responses.retrieve(third.id) == third
        assert [item.type for item in sdk.responses.input_items.list(third.id)] == ["message"]
