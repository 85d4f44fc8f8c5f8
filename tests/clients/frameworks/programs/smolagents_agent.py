"""smolagents: a loop of a `ToolCallingAgent`, which ends by the tool `final_answer`."""

from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, clock, tell, weather
from smolagents import ActionStep, OpenAIServerModel, ToolCallingAgent, tool

NAMES = (*ORDER, "final_answer")


def choice(step: int) -> dict[str, Any]:
    """`tool_choice` of a step."""
    return {"type": "function", "function": {"name": NAMES[step]}}


def choose_next(step: ActionStep, agent: ToolCallingAgent) -> None:
    """Called after each step."""
    agent.model.kwargs["tool_choice"] = choice(min(step.step_number, len(NAMES) - 1))


model = OpenAIServerModel(MODEL, api_base=URL, api_key="none", temperature=0, max_tokens=64, tool_choice=choice(0))
agent = ToolCallingAgent(tools=[tool(weather), tool(clock)], model=model, step_callbacks=[choose_next], max_steps=3)
final = agent.run(QUESTION)
steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
tell(final=final, steps=[call.name for step in steps for call in step.tool_calls or ()], requests=len(steps))
