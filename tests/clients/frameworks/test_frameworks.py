"""Each framework loops over two tools to a final text, and gets structured answers. The model's wit does not count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.frameworks.conftest import Served
from tests.clients.frameworks.environment import run_program

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

CITIES, ZONES = ("Rome", "Paris"), ("UTC", "CET")


def check_loop(found: dict[str, Any], steps: list[str]) -> None:
    """Both tools ran once, in order, with arguments of their schemas; the framework saw these steps and a text."""
    (weather, about), (clock, when) = found["received"]
    assert (weather, clock) == ("weather", "clock")
    assert about.keys() == {"city"}
    assert about["city"] in CITIES
    assert when.keys() == {"zone"}
    assert when["zone"] in ZONES
    assert found["requests"] == 3
    assert found["steps"] == steps
    assert found["final"].strip()


def check_reports(found: dict[str, Any], count: int) -> None:
    """Every structured answer has its form."""
    assert len(found["structured"]) == count
    for report in found["structured"]:
        assert report.keys() == {"city", "degrees"}
        assert report["city"] in CITIES
        assert -20 <= report["degrees"] <= 50


def test_pydantic_ai(served: Served) -> None:
    found = run_program("pydantic_ai_agent", served.url, served.model)
    check_loop(found, ["user-prompt", "tool-call", "tool-return", "tool-call", "tool-return", "text"])
    check_reports(found, 2)
    assert found["streamed"].strip()


def test_openai_agents(served: Served) -> None:
    found = run_program("openai_agents", served.url, served.model)
    called = ["tool_call_item", "tool_call_output_item"]
    check_loop(found, [*called, *called, "message_output_item"])
    check_reports(found, 2)
    assert found["structured"][0] == found["structured"][1]  # the final output, and what its deltas add up to


def test_openai_agents_on_responses(served: Served) -> None:
    """Each call sends only what is new: the server has the conversation."""
    found = run_program("openai_agents_responses", served.url, served.model)
    called = ["tool_call_item", "tool_call_output_item"]
    check_loop(found, [*called, *called, "message_output_item"])
    check_reports(found, 2)
    assert found["structured"][0] == found["structured"][1]
    assert found["previous"] == [None, *found["made"][:-1]]
    assert found["inputs"] == [["message"], ["function_call_output"], ["function_call_output"], ["message"]]


def test_langgraph(served: Served) -> None:
    found = run_program("langgraph_agent", served.url, served.model)
    check_loop(found, ["human", "ai", "tool", "ai", "tool", "ai"])
    check_reports(found, 2)
    assert found["streamed"] == found["final"]


def test_instructor(served: Served) -> None:
    """The third report is refused once, by the program: the model is asked again, with its call and the error."""
    found = run_program("instructor_answers", served.url, served.model)
    check_reports(found, 4)
    assert found["attempts"] == 2


def test_litellm(served: Served) -> None:
    found = run_program("litellm_calls", served.url, served.model, requirements="requirements-litellm.txt")
    check_loop(found, ["user", "assistant", "tool", "assistant", "tool"])
    check_reports(found, 1)


def test_smolagents(served: Served) -> None:
    found = run_program("smolagents_agent", served.url, served.model)
    check_loop(found, ["weather", "clock", "final_answer"])
