"""Tools and calls in a chat's messages, for templates that write them and for those that do not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.domain.text import is_nested_too_deep
from app.tools.definitions import Tool
from app.tools.formats import ToolFormat

Message = Mapping[str, Any]
"""A message as chat templates read it; the arguments of its calls are texts, most of them of JSON objects."""


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The calls of a message. What a client has put there in another form is for the template alone."""
    found: Any = message.get("tool_calls")
    functions = [each.get("function") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    texts = [each.get(key) for each in functions if isinstance(each, dict) for key in ("name", "arguments")]
    has_form = isinstance(found, list) and len(texts) == 2 * len(found) and all(isinstance(each, str) for each in texts)
    return found if has_form else []


def messages_for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for a template that writes calls itself: arguments become objects where they are JSON objects."""
    return [_with_objects(message) for message in messages]


def messages_as_text(messages: Sequence[Message], form: ToolFormat) -> list[dict[str, Any]]:
    """The messages for a template that knows no calls.

    - A call is text of the assistant, as the model wrote it.
    - What tools answered is a message of the user.
    """
    return list(_join_answers(_as_text(message, form) for message in messages))


def with_instructions(messages: list[dict[str, Any]], tools: Sequence[Tool], form: ToolFormat) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: the system's begins with them, and with how to call them."""
    about = _instructions(tools, form)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{about}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": about}, *messages]


def _with_objects(message: Message) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_object(call["function"]["arguments"])}}
        for call in calls_of(message)
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_object(arguments: str) -> Any:
    """Arguments as an object; a text that is none stays a text, as the model left it. Clients write none as `""`.

    A text that is nested too deep stays a text too: templates follow an object level by level.
    """
    if is_nested_too_deep(arguments):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(message: Message, form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        form.write(json.dumps(call["function"]["name"]), call["function"]["arguments"] or "{}")
        for call in calls_of(message)
    ]
    if not calls:
        return dict(message)
    said = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*said, form.write_all(calls)])}


def _join_answers(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Answers of tools that follow each other are one message: templates may want users and assistants in turns."""
    answers: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(message["content"])
            continue
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}
            answers = []
        yield message
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _instructions(tools: Sequence[Tool], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools)
    call = form.write_all([form.write("NAME", "ARGUMENTS")])
    return (
        f"You can call the functions below. Each line describes one, with a JSON Schema of its arguments.\n"
        f"<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer in this form, with a JSON object in place of ARGUMENTS:\n{call}"
    )
