"""OpenAI Agents SDK on `/v1/responses`: a loop that sends only new items, and a structured answer that is streamed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, RunHooks, Runner, function_tool
from openai import AsyncOpenAI

SETTINGS = ModelSettings(temperature=0, max_tokens=200)
LAST = replace(SETTINGS, tool_choice="none", extra_body={"structured_outputs": {"regex": "[A-Z][a-z]{3,12}"}})
"""The SDK takes no response that is incomplete, and a small model may not come to the end of a text by itself."""
UNTRACED = RunConfig(tracing_disabled=True)
client = AsyncOpenAI(base_url=URL, api_key="none")
model = OpenAIResponsesModel(MODEL, client)


class NextTool(RunHooks[None]):
    """Names the tool of the next step, once a tool has run."""

    async def on_tool_end(self, context: Any, agent: Agent[None], tool: Any, result: Any) -> None:
        """Called after each tool."""
        step = ORDER.index(tool.name) + 1
        agent.model_settings = replace(SETTINGS, tool_choice=ORDER[step]) if step < len(ORDER) else LAST


async def main() -> None:
    """Run both. The second goes on after the first's last response."""
    looping = Agent(
        name="loop",
        model=model,
        tools=[function_tool(weather), function_tool(clock)],
        model_settings=replace(SETTINGS, tool_choice=ORDER[0]),
        reset_tool_choice=False,
    )
    loop = await Runner.run(looping, QUESTION, hooks=NextTool(), run_config=UNTRACED, auto_previous_response_id=True)
    reporting = Agent(name="report", model=model, output_type=Report, model_settings=SETTINGS)
    streamed = Runner.run_streamed(
        reporting, "Report on it.", run_config=UNTRACED, previous_response_id=loop.last_response_id
    )
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    from_deltas = Report.model_validate_json("".join(deltas))
    made = [str(response.response_id) for response in [*loop.raw_responses, *streamed.raw_responses]]
    kept = [await client.responses.retrieve(response_id) for response_id in made]
    own = [await client.responses.input_items.list(response_id) for response_id in made]
    tell(
        final=loop.final_output,
        steps=[item.type for item in loop.new_items],
        requests=len(loop.raw_responses),
        structured=[report.model_dump(mode="json") for report in (streamed.final_output, from_deltas)],
        made=made,
        previous=[response.previous_response_id for response in kept],
        inputs=[[item.type for item in items.data] for items in own],
    )


asyncio.run(main())
