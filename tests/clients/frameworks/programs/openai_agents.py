"""OpenAI Agents SDK: a loop, and a structured answer that is streamed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, RunHooks, Runner, function_tool
from openai import AsyncOpenAI

SETTINGS = ModelSettings(temperature=0, max_tokens=200)
UNTRACED = RunConfig(tracing_disabled=True)
model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL, api_key="none"))


class NextTool(RunHooks[None]):
    """Names the tool of the next step, once a tool has run."""

    async def on_tool_end(self, context: Any, agent: Agent[None], tool: Any, result: Any) -> None:
        """Called after each tool."""
        step = ORDER.index(tool.name) + 1
        choice, most = (ORDER[step], 200) if step < len(ORDER) else ("none", 16)
        agent.model_settings = replace(SETTINGS, tool_choice=choice, max_tokens=most)


async def main() -> None:
    """Run both."""
    looping = Agent(
        name="loop",
        model=model,
        tools=[function_tool(weather), function_tool(clock)],
        model_settings=replace(SETTINGS, tool_choice=ORDER[0]),
        reset_tool_choice=False,
    )
    loop = await Runner.run(looping, QUESTION, hooks=NextTool(), run_config=UNTRACED)
    reporting = Agent(name="report", model=model, output_type=Report, model_settings=SETTINGS)
    streamed = Runner.run_streamed(reporting, QUESTION, run_config=UNTRACED)
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    from_deltas = Report.model_validate_json("".join(deltas))
    tell(
        final=loop.final_output,
        steps=[item.type for item in loop.new_items],
        requests=len(loop.raw_responses),
        structured=[report.model_dump(mode="json") for report in (streamed.final_output, from_deltas)],
    )


asyncio.run(main())
