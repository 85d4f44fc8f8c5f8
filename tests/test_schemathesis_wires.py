"""Generated requests to the OpenAI and Anthropic routes: each answer, and each event of a stream, is documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from schemathesis import GenerationMode

from tests.fuzzing import STREAMING, Campaign
from tests.openai.reference import save_tiny_model
from tests.serving import serve

WITHOUT_FIELDS = (
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/models",
    "GET /v1/models/{model}",
)
"""Requests to them have no field that could be invalid. An id may be unknown."""
WITH_FIELDS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "GET /v1/responses/{response_id}",
    "GET /v1/responses/{response_id}/input_items",
    "POST /tokenize",
    "POST /detokenize",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
)
EXAMPLES = {GenerationMode.POSITIVE: 25, GenerationMode.NEGATIVE: 4}
"""Bad requests take longest to make."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    with serve(model=str(folder), max_sessions=100_000) as url:
        campaign = Campaign(url)
        yield campaign
        campaign.close()


def test_no_route_is_left_out(campaign: Campaign) -> None:
    assert campaign.operations.keys() == {*WITH_FIELDS, *WITHOUT_FIELDS}


@pytest.mark.parametrize("operation", WITH_FIELDS + WITHOUT_FIELDS)
def test_good_requests(campaign: Campaign, operation: str) -> None:
    answered = campaign.run(operation, GenerationMode.POSITIVE, examples=EXAMPLES[GenerationMode.POSITIVE])
    if operation.endswith("/cancel"):  # the response is over
        assert answered.keys() == {(400, "application/json")}
    else:
        assert (200, "application/json") in answered
    assert ((200, "text/event-stream") in answered) is (operation.partition(" ")[2] in STREAMING)


@pytest.mark.parametrize("operation", WITH_FIELDS)
def test_bad_requests(campaign: Campaign, operation: str) -> None:
    answered = campaign.run(operation, GenerationMode.NEGATIVE, examples=EXAMPLES[GenerationMode.NEGATIVE])
    assert any(status == 400 for status, _ in answered)
