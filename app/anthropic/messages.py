"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and their prompt."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar, GrammarKind
from app.text.tokenizer import CharacterLimit, TextLimit, Tokens
from app.tools.definitions import Tool, ToolMode, ToolUse, check_parameters
from app.tools.support import ToolSupport, form_without_effect, turn_grammar
from app.wire.base import MAX_COUNT, LongList, WireModel
from app.wire.extras import ANTHROPIC, OpenBody
from app.wire.turns import SamplingFields, StopString, schema_text


class TextBlock(OpenBody):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(OpenBody):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


def _form(content: object) -> str:
    return "list of blocks" if isinstance(content, list) else "plain text"


def _kind_of(*kinds: str) -> Callable[[object], str | None]:
    """Tells which of the `kinds` a block is."""

    def kind(block: object) -> str | None:
        found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return found if found in kinds else None

    return kind


TextContent = TypeAliasType(
    "TextContent",
    Annotated[
        Annotated[str, Tag("plain text")] | Annotated[LongList[TextBlock], Tag("list of blocks")], Discriminator(_form)
    ],
)


class ToolResultBlock(OpenBody):
    """What a tool answered to the call of that id."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: TextContent = ""
    is_error: bool = Field(False, description="the model reads `Error: ` in front of the content")

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


UserBlock = TypeAliasType(
    "UserBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")] | Annotated[ToolResultBlock, Tag("tool_result")],
        Discriminator(
            _kind_of("text", "tool_result"),
            custom_error_type="kind",
            custom_error_message="a block of type text or tool_result: the models here read text",
        ),
    ],
)
AssistantBlock = TypeAliasType(
    "AssistantBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")] | Annotated[ToolUseBlock, Tag("tool_use")],
        Discriminator(
            _kind_of("text", "tool_use"),
            custom_error_type="kind",
            custom_error_message="a block of type text or tool_use: the models here write text and calls",
        ),
    ],
)
UserContent = Annotated[
    Annotated[str, Tag("plain text")] | Annotated[LongList[UserBlock], Tag("list of blocks")], Discriminator(_form)
]
AssistantContent = Annotated[
    Annotated[str, Tag("plain text")] | Annotated[LongList[AssistantBlock], Tag("list of blocks")], Discriminator(_form)
]


def text_of(content: str | Iterable[TextBlock]) -> str:
    """The content as one text: blocks are lines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


ID_PREFIX = "toolu_"
"""Begins the ids of calls. Chat templates read the rest, whose length some of them check."""

Chat = list[dict[str, Any]]


class SystemInput(OpenBody):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: TextContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it."""
        yield {"role": "system", "content": text_of(self.content)}


class UserInput(OpenBody):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: UserContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it: each answer of a tool is a message of its own."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for block in self.content:
            if isinstance(block, TextBlock):
                yield {"role": "user", "content": block.text}
            else:
                call_id = block.tool_use_id.removeprefix(ID_PREFIX)
                yield {"role": "tool", "content": block.text, "tool_call_id": call_id}


class AssistantInput(OpenBody):
    """What the model said earlier, and its calls. The last message may be the beginning of the answer."""

    role: Literal["assistant"]
    content: AssistantContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it, but that the arguments of its calls are still text."""
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        calls = [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]
        yield {"role": "assistant", "content": text_of(texts)} | ({"tool_calls": calls} if calls else {})


def _role_of(message: object) -> str | None:
    found = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return found if found in ("system", "user", "assistant") else None


MessageInput = TypeAliasType(
    "MessageInput",
    Annotated[
        Annotated[SystemInput, Tag("system")]
        | Annotated[UserInput, Tag("user")]
        | Annotated[AssistantInput, Tag("assistant")],
        Discriminator(
            _role_of, custom_error_type="role", custom_error_message="a message of the role user, assistant or system"
        ),
    ],
)


def chat_of(system: str | Sequence[TextBlock] | None, messages: Sequence[MessageInput]) -> Chat:
    """The conversation as chat templates read it. Messages of one role that follow each other are one."""
    chat: Chat = [] if system is None else [{"role": "system", "content": text_of(system)}]
    for message in messages:
        for each in message.for_template():
            if chat and _is_continued(chat[-1], each):
                chat[-1]["content"] += f"\n{each.pop('content')}"
                chat[-1] |= each
            else:
                chat.append(each)
    return chat


def _is_continued(last: dict[str, Any], new: dict[str, Any]) -> bool:
    return last["role"] == new["role"] != "tool" and "tool_calls" not in last


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    call_id = block.id.removeprefix(ID_PREFIX)
    return {"id": call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]


class ToolDefinition(OpenBody):
    """A tool of the client: its purpose, and the JSON Schema of its input."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_parameters)]
    strict: bool = Field(False, description="the input follows the schema even where the model decides to call")

    def to_tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


class AutoChoice(OpenBody):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.AUTO, None, parallel=not self.disable_parallel_tool_use)


class AnyChoice(OpenBody):
    """The model calls at least one tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.REQUIRED, None, parallel=not self.disable_parallel_tool_use)


class NamedChoice(OpenBody):
    """The model calls this tool."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        named = frozenset({self.name})
        return ToolUse.of(tools, ToolMode.REQUIRED, named, parallel=not self.disable_parallel_tool_use)


class NoChoice(OpenBody):
    """The model calls nothing."""

    type: Literal["none"]

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.NONE, None, parallel=True)


def _kind_of_choice(choice: object) -> str | None:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return kind if kind in ("auto", "any", "tool", "none") else None


ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("auto")]
    | Annotated[AnyChoice, Tag("any")]
    | Annotated[NamedChoice, Tag("tool")]
    | Annotated[NoChoice, Tag("none")],
    Discriminator(
        _kind_of_choice, custom_error_type="kind", custom_error_message="an object of type auto, any, tool or none"
    ),
]


def tool_use(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolUse:
    """What a turn may do with the tools. Raises `FieldOutOfRange` if the fields do not fit together."""
    return (choice or AutoChoice(type="auto")).to_use([tool.to_tool() for tool in tools])


class MessagesQuery(WireModel):
    """The query of these routes."""

    beta: bool = Field(False, description="SDKs send it with beta features; it changes nothing", strict=False)


class ThinkingDisabled(OpenBody):
    """No thinking: the models' answers are all that they write."""

    type: Literal["disabled"]


class OutputFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenBody):
    """The form of the answer."""

    format: OutputFormat | None = None


class Metadata(OpenBody):
    """About the call."""

    user_id: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens, as `user`",
    )


class PromptFields(OpenBody):
    """The fields that make the prompt of a call, and those that say what it may call."""

    place: ClassVar[str] = ANTHROPIC

    model: str = Field(description="the served model's name, as /v1/models gives it")
    messages: LongList[MessageInput] = Field(
        min_length=1, description="the last may be of the assistant: it is continued"
    )
    system: TextContent | None = Field(None, description="instructions, in front of the messages")
    tools: list[ToolDefinition] = Field(default=[], max_length=MAX_TOOLS, description="tools to call")
    tool_choice: ToolChoice | None = Field(None, description="what is called (default: auto)")
    thinking: ThinkingDisabled | None = None
    output_config: OutputConfig | None = None

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return tool_use(self.tools, self.tool_choice)


class CountTokensBody(PromptFields):
    """A call whose prompt is to be counted."""


class MessagesBody(SamplingFields, PromptFields):
    """A conversation to go on with."""

    max_tokens: int = Field(ge=0, le=MAX_COUNT, description="most tokens to generate; 0 only computes the prompt")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(
        default=[], description="strings that end the answer, whose text ends before them"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    metadata: Metadata | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop_sequences`, and `stop` of other APIs."""
        return *self.stop_sequences, *super().stop_strings

    @property
    def user(self) -> str | None:
        """The caller's name for its end user."""
        return None if self.metadata is None else self.metadata.user_id

    def without_effect(self) -> list[str]:
        """See `OpenBody`."""
        return [*super().without_effect(), *form_without_effect(self.to_grammar(), self.to_tool_use())]

    def to_grammar(self) -> Grammar | None:
        """What the answer must match, from `output_config` or `structured_outputs`."""
        asked = None if self.output_config is None else self.output_config.format
        if asked is None:
            return super().to_grammar()
        if self.structured_outputs is not None:
            raise FieldOutOfRange("give only one of output_config and structured_outputs", param="output_config")
        return Grammar(GrammarKind.JSON_SCHEMA, schema_text(asked.json_schema), "output_config.format.schema")

    def to_turn_grammar(self, use: ToolUse, support: ToolSupport) -> Grammar | None:
        """What holds the turn: the form of the answer, the calls that it may make, or either of them.

        Raises `FieldOutOfRange` for a form that cannot stand beside calls.
        """
        return turn_grammar(self.to_grammar(), use, support)


def prompt_tokens(
    body: PromptFields, tokens: Tokens, support: ToolSupport, limit: TextLimit | CharacterLimit | None = None
) -> list[int]:
    """The conversation in the model's own template, with its tools.

    Raises `FieldOutOfRange` if the last message cannot be continued or the tools do not fit together, and
    `MalformedRequest` if the template rejects the messages, and `ContextTooLong` if they are certainly too long.
    """
    chat = chat_of(body.system, body.messages)
    continues = body.messages[-1].role == "assistant"
    if continues:
        _check_continued(chat, f"messages.{len(body.messages) - 1}.content")
    text = support.chat_text(
        chat, body.to_tool_use().tools, add_generation_prompt=not continues, continue_final_message=continues
    )
    return tokens.encode(text, add_special_tokens=False, limit=limit)


def _check_continued(chat: Chat, field: str) -> None:
    if "tool_calls" in chat[-1]:
        raise FieldOutOfRange(f"{field}: its calls need answers of type tool_result after them", param=field)
    text = chat[-1]["content"]
    if not text or text[-1].isspace():
        raise FieldOutOfRange(
            f"{field}: an answer can only continue a text that does not end in white space", param=field
        )
