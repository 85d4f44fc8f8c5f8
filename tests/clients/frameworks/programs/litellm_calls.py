"""LiteLLM: a loop over calls that are whole and streamed, and a structured answer."""

import json
from typing import Any

import litellm
from agent_tools import MODEL, ORDER, QUESTION, URL, Report, clock, tell, weather

FUNCTIONS: Any = {"weather": weather, "clock": clock}
ARGUMENTS = {"weather": ("city", ["Rome", "Paris"]), "clock": ("zone", ["UTC", "CET"])}


def _schema(key: str, values: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"enum": values}}, "required": [key], "additionalProperties": False}


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": FUNCTIONS[name].__doc__, "parameters": _schema(*taken)},
    }
    for name, taken in ARGUMENTS.items()
]
ASKED: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 200}

messages: list[Any] = [{"role": "user", "content": QUESTION}]
for step, name in enumerate(ORDER):
    choice = {"type": "function", "function": {"name": name}}
    asked = {**ASKED, "messages": messages, "tools": TOOLS, "tool_choice": choice}
    if step:
        answer = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    else:
        answer = litellm.completion(**asked)
    assert answer.choices[0].finish_reason == "tool_calls", answer
    messages.append(answer.choices[0].message)
    for call in answer.choices[0].message.tool_calls:
        said = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
last = litellm.completion(**{**ASKED, "max_tokens": 16}, messages=messages, tools=TOOLS, tool_choice="none")
structured = litellm.completion(**ASKED, messages=messages[:1], response_format=Report)
tell(
    final=last.choices[0].message.content,
    steps=[message["role"] for message in messages],
    requests=len(ORDER) + 1,
    structured=[json.loads(structured.choices[0].message.content)],
)
