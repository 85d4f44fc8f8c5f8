"""The pages about the OpenAI and Anthropic APIs have each field of each route, and what becomes of it."""

import re

import pytest

from app.anthropic.messages import CountTokensBody, MessagesBody
from app.openai.chat import ChatBody
from app.openai.completions import CompletionBody
from app.openai.models import DetokenizeBody, TokenizeBody
from app.openai.response_input import ResponseBody
from app.routers.embeddings import EmbeddingBody
from app.wire.calls import ANTHROPIC, UNSUPPORTED, OpenBody
from app.wire.turns import SamplingFields
from tests.test_docs import PAGES


def section(page: str, heading: str) -> str:
    """From a heading to the next one of any level."""
    return re.split(r"^#+ ", PAGES[page].partition(f"\n{heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def table(page: str, route: str) -> dict[str, set[str]]:
    """The fields in the table of a route: those that are taken, refused and ignored."""
    found: dict[str, set[str]] = {"taken": set(), "refused": set(), "ignored": set()}
    for _, name, does, _ in (
        row.split("|") for row in re.findall(r"^\| .*", section(page, f"## `{route}`"), re.MULTILINE)
    ):
        kind = next((kind for kind in ("refused", "ignored") if name.strip().startswith(kind)), "taken")
        found[kind] |= set(re.findall(r"`([\w.]+)`", name if kind == "taken" else does))
    return found


def unsupported(body: type[OpenBody], *, refused: bool) -> set[str]:
    """The known fields that have no effect in such a body, by their paths without indices."""
    found = set()
    for place, fields in UNSUPPORTED.items():
        start, _, inner = place.partition(".") if body.place else ("", "", place)
        if start == body.place and (not inner or inner.partition(".")[0] in body.model_fields):
            names = {name for name, field in fields.items() if (field.reason is not None) is refused}
            found |= {f"{inner}.{name}" for name in names} if inner else names - body.model_fields.keys()
    return found


@pytest.mark.parametrize(
    ("page", "route", "body"),
    [
        ("openai", "/v1/completions", CompletionBody),
        ("openai", "/v1/chat/completions", ChatBody),
        ("openai", "/v1/responses", ResponseBody),
        ("anthropic", "/v1/messages", MessagesBody),
    ],
)
def test_the_table_of_a_route_has_all_its_fields(page: str, route: str, body: type[OpenBody]) -> None:
    found = table(page, route)
    assert {name for name in found["taken"] if "." not in name} == body.model_fields.keys()
    assert found["refused"] == unsupported(body, refused=True)
    assert found["ignored"] == unsupported(body, refused=False)


@pytest.mark.parametrize(
    ("page", "lists"),
    [("openai", ["## Refused fields", "## Fields without effect"]), ("anthropic", ["## Ignored fields"])],
)
def test_the_lists_of_reasons_have_every_unsupported_field(page: str, lists: list[str]) -> None:
    written = set(re.findall(r"`(?:\w+\.)*(\w+)`", " ".join(section(page, heading) for heading in lists)))
    places = [place for place in UNSUPPORTED if place.startswith(ANTHROPIC) is (page == "anthropic")]
    assert {name for place in places for name in UNSUPPORTED[place]} <= written


@pytest.mark.parametrize(
    ("page", "route", "body"),
    [
        ("openai", "/tokenize", TokenizeBody),
        ("openai", "/detokenize", DetokenizeBody),
        ("openai", "/v1/embeddings", EmbeddingBody),
        ("anthropic", "/v1/messages/count_tokens", CountTokensBody),
    ],
)
def test_every_field_of_a_route_that_only_counts_is_documented(page: str, route: str, body: type[OpenBody]) -> None:
    assert body.model_fields.keys() <= set(re.findall(r"`(\w+)`", section(page, f"## `{route}`")))


def test_every_sampling_field_is_documented() -> None:
    rows = re.findall(r"^\| (`.*?) \|", section("api", "## Sampling"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == SamplingFields.model_fields.keys()
