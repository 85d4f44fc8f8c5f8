"""Pydantic AI: a loop, a structured answer by a tool, one by a JSON schema, and a streamed text."""

from typing import Any

from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"temperature": 0, "max_tokens": 200}
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))


class ToolOfEachStep(AbstractCapability[None]):
    """Names the tool of each step."""

    def get_model_settings(self) -> Any:
        """Settings that depend on the step."""

        def settings(context: RunContext[None]) -> Any:
            step = context.run_step - 1
            named = {"tool_choice": [ORDER[step]]} if step < len(ORDER) else {"tool_choice": "none", "max_tokens": 16}
            return {**SETTINGS, **named}

        return settings


loop = Agent(model, tools=[weather, clock], capabilities=[ToolOfEachStep()]).run_sync(QUESTION)
by_tool = Agent(model, output_type=ToolOutput(Report), model_settings=SETTINGS).run_sync(QUESTION)
by_schema = Agent(model, output_type=NativeOutput(Report), model_settings=SETTINGS).run_sync(QUESTION)
streamed = Agent(model, model_settings={**SETTINGS, "max_tokens": 16}).run_stream_sync(QUESTION)
tell(
    final=loop.output,
    steps=[part.part_kind for message in loop.all_messages() for part in message.parts],
    requests=loop.usage.requests,
    structured=[by_tool.output.model_dump(mode="json"), by_schema.output.model_dump(mode="json")],
    streamed="".join(streamed.stream_text(delta=True)),
)
