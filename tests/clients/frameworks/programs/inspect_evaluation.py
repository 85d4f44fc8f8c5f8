"""Inspect AI: an evaluation by `djinn/MODEL` with edits and captures, and a call of a tool."""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent_tools import MODEL, QUESTION, tell, weather
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolDef, ToolFunction

import djinn.inspect_ai
from client.captures import parse_captures
from djinn import Djinn

SHORT = GenerateConfig(temperature=0, max_tokens=8)
SILENCE = {"layer": 2, "action": "edit", "edits": [{"op": "ablate"}]}
STATES = {"layer": 1, "action": "capture", "when": {"pass": "prefill"}}
with Djinn(sys.argv[1]) as server:  # another framework may have left some
    before = {session.id for session in server.sessions.list()}
samples = [Sample(input="What is the capital of France?", target="Paris"), Sample(input="And of Italy?", target="Rome")]

with TemporaryDirectory() as folder:

    def outputs(**options: Any) -> list[Any]:
        """Of the evaluation's samples, by the model with these options."""
        model = get_model(f"djinn/{MODEL}", base_url=sys.argv[1], config=SHORT, memoize=False, **options)
        [log] = eval(
            Task(dataset=samples, solver=generate(), scorer=includes()), model=model, log_dir=folder, display="none"
        )
        assert log.status == "success", log.error
        return [sample.output for sample in log.samples or []]

    watched = outputs(breakpoints=[STATES], captures=f"{folder}/kept")
    files = [parse_captures(Path(each.metadata["djinn"]["captures"]).read_bytes()) for each in watched]
    plain, edited = outputs(), outputs(breakpoints=[SILENCE])

model = get_model(f"djinn/{MODEL}", base_url=sys.argv[1], config=SHORT, memoize=False)


async def ask() -> Any:
    """The points, and an answer that calls the tool."""
    tools = [ToolDef(weather, "weather", "Tell the weather.", {"city": "the city to look up"})]
    config = GenerateConfig(temperature=0, max_tokens=200)
    called = await model.generate(QUESTION, tools=tools, tool_choice=ToolFunction("weather"), config=config)
    api: Any = model.api
    return await api.points(), called.message.tool_calls


points, [call] = asyncio.run(ask())
refused = []
for wrong in ({"layer": 1, "action": "pause"}, STATES):
    try:
        djinn.inspect_ai.DjinnAPI(MODEL, sys.argv[1], breakpoints=[wrong])
    except ValueError as error:
        refused.append(str(error).partition(":")[0])
weather(**call.arguments)
with Djinn(sys.argv[1]) as server:
    left = len({session.id for session in server.sessions.list()} - before)
tell(
    plain=[each.completion for each in plain],
    watched=[each.completion for each in watched],
    edited=[each.completion for each in edited],
    prompts=[each.usage.input_tokens for each in watched],
    captured=[sum(len(record.positions) for record in each.records) for each in files],
    points=[each.name for each in points],
    refused=refused,
    left=left,
)
