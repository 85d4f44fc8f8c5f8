"""Each framework loops over two tools to a final text, and gets structured answers. The model's wit does not count."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.model_store.pull import CATALOG, pulled_folder
from app.settings import Settings
from tests.clients.environments import ROOT, python_environment, run
from tests.openai.reference import save_tiny_model
from tests.processes import serve_process

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

PULLED, TINY = "smollm2-135m-instruct", "tiny"
FOLDER = Path(__file__).parent
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "LANGSMITH_TRACING": "false"}
"""No framework looks anything up, or reports to anybody."""
CITIES, ZONES = ("Rome", "Paris"), ("UTC", "CET")


@dataclass(frozen=True)
class Served:
    """A server process and its model."""

    url: str
    model: str


@pytest.fixture(scope="session")
def pulled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 if it is there, else the tiny model. It is for one framework: each of its turns takes seconds."""
    if not pulled_folder(CATALOG[PULLED], Settings().cache_dir).is_dir():
        yield request.getfixturevalue("tiny")
        return
    folder = tmp_path_factory.mktemp("server") / "state"
    with serve_process(folder, "--model", PULLED, "--kv-device", "512MiB") as server:
        yield Served(server.url, PULLED)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny model, each byte of which is a token, with room for tools. Its calls end as agents expect."""
    folder = tmp_path_factory.mktemp("server")
    save_tiny_model(folder / TINY, max_model_len=16384, may_end=True)
    flags = ("--model", str(folder / TINY), "--kv-device", "64MiB")
    with serve_process(folder / "state", *flags) as server:
        yield Served(server.url, TINY)


@cache
def python_of(requirements: str) -> str:
    """The Python of an environment with a file's packages; the first call installs them."""
    packages = (FOLDER / requirements).read_text().split()
    return str(python_environment(".venv-frameworks", Path(requirements).stem, packages, "--no-deps"))


def run_program(name: str, url: str, model: str, *words: str, requirements: str = "requirements.txt") -> dict[str, Any]:
    """What one of `programs` found. Raises `AssertionError` if it fails."""
    said = run(python_of(requirements), str(FOLDER / "programs" / f"{name}.py"), url, model, *words, **QUIET)
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith('{"received"')))
    return found


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


def test_pydantic_ai(tiny: Served) -> None:
    found = run_program("pydantic_ai_agent", tiny.url, tiny.model)
    check_loop(found, ["user-prompt", "tool-call", "tool-return", "tool-call", "tool-return", "text"])
    check_reports(found, 2)
    assert found["streamed"].strip()


@pytest.mark.parametrize(("api", "model"), [("chat", "pulled"), ("responses", "tiny")])
def test_openai_agents(request: pytest.FixtureRequest, api: str, model: str) -> None:
    """Each call of a response sends only what is new: the server has the conversation."""
    served: Served = request.getfixturevalue(model)
    found = run_program("openai_agents", served.url, served.model, api)
    called = ["tool_call_item", "tool_call_output_item"]
    check_loop(found, [*called, *called, "message_output_item"])
    check_reports(found, 2)
    assert found["structured"][0] == found["structured"][1]  # the final output, and what its deltas add up to
    if api == "chat":
        return
    assert found["previous"] == [None, *found["made"][:-1]]
    assert found["inputs"] == [["message"], ["function_call_output"], ["function_call_output"], ["message"]]


def test_langgraph(tiny: Served) -> None:
    found = run_program("langgraph_agent", tiny.url, tiny.model)
    check_loop(found, ["human", "ai", "tool", "ai", "tool", "ai"])
    check_reports(found, 2)
    assert found["streamed"] == found["final"]


def test_instructor(tiny: Served) -> None:
    """The third report is refused once, by the program: the model is asked again, with its call and the error."""
    found = run_program("instructor_answers", tiny.url, tiny.model)
    check_reports(found, 4)
    assert found["attempts"] == 2


@pytest.mark.rare  # it needs an environment of its own
def test_litellm(tiny: Served) -> None:
    found = run_program("litellm_calls", tiny.url, tiny.model, requirements="requirements-litellm.txt")
    check_loop(found, ["user", "assistant", "tool", "assistant", "tool"])
    check_reports(found, 1)


def test_smolagents(tiny: Served) -> None:
    found = run_program("smolagents_agent", tiny.url, tiny.model)
    check_loop(found, ["weather", "clock", "final_answer"])


@pytest.mark.rare  # it needs an environment of its own
def test_inspect_ai(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client's own provider: what breakpoints see and change reaches the evaluation's outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = run_program("inspect_evaluation", tiny.url, tiny.model, requirements="requirements-inspect.txt")
    assert found["watched"] == found["plain"] != found["edited"]
    assert found["captured"] == found["prompts"]
    assert found["received"][0][1].keys() == {"city"}
    assert {"z", "pattern", "resid_mid"} < set(found["points"])
    assert (found["refused"], found["left"]) == (["breakpoints", "captures"], 0)


def test_langchains_standard_suite(tiny: Served, tmp_path: Path) -> None:
    """It runs in a folder of its own: pytest would import the packages around it, and they import Djinn."""
    suite = tmp_path / "test_standard.py"
    shutil.copy(FOLDER / "programs" / "langchain_standard.py", suite)
    alone = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), "--asyncio-mode=auto"]
    server = {"DJINN_URL": tiny.url, "DJINN_MODEL": tiny.model}
    said = run(python_of("requirements.txt"), "-m", "pytest", "-q", *alone, str(suite), **server, **QUIET)
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped|xfailed|xpassed|failed)", said)}
    assert "failed" not in counts, said
    assert counts["skipped"] == 11, said
    assert counts["passed"] + counts.get("xpassed", 0) >= 31, said
