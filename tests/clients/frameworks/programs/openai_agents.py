"""OpenAI Agents SDK: a loop, and a structured answer that is streamed. With `responses`, on `/v1/responses`, where each
call sends only new items.
"""

import asyncio
import sys
from dataclasses import replace
from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

ON_RESPONSES = "responses" in sys.argv
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
SHORT: dict[str, Any] = {"max_tokens": 16}
WHOLE: dict[str, Any] = {"extra_body": {"structured_outputs": {"regex": "[A-Z][a-z]{3,12}"}}}
"""The SDK takes no response that is incomplete, and a small model may not come to the end of a text by itself."""
LAST = replace(SETTINGS, tool_choice="none", **(WHOLE if ON_RESPONSES else SHORT))
UNTRACED = RunConfig(tracing_disabled=True)
client = AsyncOpenAI(base_url=URL, api_key="none")
model = (OpenAIResponsesModel if ON_RESPONSES else OpenAIChatCompletionsModel)(MODEL, client)


class NextTool(RunHooks[None]):
    """Names the tool of the next step, once a tool has run."""

    async def on_tool_end(self, context: Any, agent: Agent[None], tool: Any, result: Any) -> None:
        """Called after each tool."""
        step = ORDER.index(tool.name) + 1
        agent.model_settings = replace(SETTINGS, tool_choice=ORDER[step]) if step < len(ORDER) else LAST


async def main() -> None:
    """Run both. On `/v1/responses` the second goes on after the first's last response."""
    looping = Agent(
        name="loop",
        model=model,
        tools=[function_tool(weather), function_tool(clock)],
        model_settings=replace(SETTINGS, tool_choice=ORDER[0]),
        reset_tool_choice=False,
    )
    loop = await Runner.run(
        looping, QUESTION, hooks=NextTool(), run_config=UNTRACED, auto_previous_response_id=ON_RESPONSES
    )
    reporting = Agent(name="report", model=model, output_type=Report, model_settings=SETTINGS)
    question, previous = ("Report on it.", loop.last_response_id) if ON_RESPONSES else (QUESTION, None)
    streamed = Runner.run_streamed(reporting, question, run_config=UNTRACED, previous_response_id=previous)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    from_deltas = Report.model_validate_json("".join(deltas))
    responses = [*loop.raw_responses, *streamed.raw_responses] if ON_RESPONSES else []
    made = [str(response.response_id) for response in responses]
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
