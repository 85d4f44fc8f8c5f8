"""From the items of a conversation to the messages of a chat, which chat templates read."""

from collections.abc import Iterable, Sequence

from app.domain.errors import FieldOutOfRange
from app.openai.messages import (
    AssistantMessage,
    FunctionCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from app.openai.responses.items import (
    AnyItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputMessageItem,
    InputTextPart,
    OutputMessageItem,
)


def to_messages(instructions: str | None, items: Iterable[AnyItem]) -> list[Message]:
    """The chat: the instructions, then the items. Calls belong to the assistant's message before them."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append(SystemMessage(role="system", content=instructions))
    for item in items:
        match item:
            case FunctionCallItem():
                _add_call(messages, item)
            case OutputMessageItem():
                said = "\n".join(part.text for part in item.content)
                messages.append(AssistantMessage(role="assistant", content=said))
            case FunctionCallOutputItem():
                text = item.output if isinstance(item.output, str) else _joined(item.output)
                messages.append(ToolMessage(role="tool", content=text, tool_call_id=item.call_id))
            case InputMessageItem(role="user"):
                messages.append(UserMessage(role="user", content=_joined(item.content)))
            case InputMessageItem():
                messages.append(SystemMessage(role="system", content=_joined(item.content)))
    return messages


def check_calls(before: Sequence[AnyItem], new: Sequence[AnyItem]) -> None:
    """Raise `FieldOutOfRange` for an output among the `new` items whose call comes nowhere before it."""
    called = {item.call_id for item in before if isinstance(item, FunctionCallItem)}
    for item in new:
        if isinstance(item, FunctionCallItem):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem) and item.call_id not in called:
            message = f"input: there is no function_call with call_id {item.call_id[:100]!r} before its output"
            raise FieldOutOfRange(message, param="input")


def _add_call(messages: list[Message], item: FunctionCallItem) -> None:
    function = FunctionCall(name=item.name, arguments=item.arguments)
    call = ToolCall(id=item.call_id, type="function", function=function)
    last = messages[-1] if messages else None
    if isinstance(last, AssistantMessage):
        messages[-1] = last.model_copy(update={"tool_calls": [*(last.tool_calls or ()), call]})
    else:
        messages.append(AssistantMessage(role="assistant", content="", tool_calls=[call]))


def _joined(parts: Sequence[InputTextPart]) -> str:
    return "\n".join(part.text for part in parts)
