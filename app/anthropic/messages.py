"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and their prompt."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, model_validator
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.text.tokenizer import CharacterLimit, TextLimit, Tokens
from app.tools.definitions import PREFIX_END, Tool, ToolMode, ToolUse, check_parameters, mark_instructions
from app.tools.replay import Chat, ChatPrompt
from app.tools.support import ToolSupport
from app.tools.thinking import Seal, Wish
from app.wire.base import MAX_COUNT, LongList, TextOrList, WireModel, by_tag, type_of
from app.wire.calls import ANTHROPIC, DOCUMENT_LEFT_OUT, IMAGE_LEFT_OUT, CallBody, OpenBody
from app.wire.turns import StopString, json_form

BILLING = "x-anthropic-billing-header:"


class TextBlock(OpenBody):
    """Text."""

    type: Literal["text"]
    text: str


def without_billing(text: str) -> str:
    """Instructions without a first line of Claude Code about billing. It is another one in each call: what follows
    would never find its KV.
    """
    return text.partition("\n")[2] if text.startswith(BILLING) else text


class SystemBlock(TextBlock):
    """A part of the instructions. A line about billing is for no model."""

    def without_effect(self) -> Iterable[str]:
        """The text with a line about billing."""
        return ["text"] if self.text.startswith(BILLING) else []


class ToolUseBlock(OpenBody):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


class FileBlock(OpenBody):
    """An image or a document such as a PDF, which no model here sees: a text stands in its place."""

    reads_extras: ClassVar[bool] = True

    type: Literal["image", "document"]

    @property
    def text(self) -> str:
        """What the model reads."""
        return IMAGE_LEFT_OUT if self.type == "image" else DOCUMENT_LEFT_OUT


class ToolReferenceBlock(OpenBody):
    """A tool that a search has found: the model reads its name, or the tool itself if that waited for it."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=256)
    _found: Tool | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.tool_name if self._found is None else json.dumps(self._found.for_template(), ensure_ascii=False)

    def show(self, tool: Tool) -> None:
        """The model reads of the tool here."""
        self._found = tool


def _by_block(*tags: str) -> Discriminator:
    """Tells blocks apart by their type; images and documents are a `file`."""

    def tag_of(block: object) -> str | None:
        kind = type_of(block)
        tag = "file" if kind in ("image", "document") else kind
        return tag if tag in tags else None

    words = ", ".join(tag for tag in tags if tag != "file")
    return Discriminator(
        tag_of,
        custom_error_type="kind",
        custom_error_message=f"a block of type {words}, image or document: the models here read text",
    )


ResultBlock = TypeAliasType(
    "ResultBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[FileBlock, Tag("file")]
        | Annotated[ToolReferenceBlock, Tag("tool_reference")],
        _by_block("text", "file", "tool_reference"),
    ],
)


def _files(content: str | Sequence[OpenBody]) -> list[str]:
    """The paths of images and documents in the content of a message or a result."""
    return [f"content.{index}" for index, block in enumerate(content) if isinstance(block, FileBlock)]


SystemContent = TypeAliasType("SystemContent", TextOrList[str, LongList[SystemBlock]])


class ToolResultBlock(OpenBody):
    """What a tool answered to the call of that id."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: TextOrList[str, LongList[ResultBlock]] = ""
    is_error: bool = Field(False, description="the model reads `Error: ` in front of the content")

    def without_effect(self) -> list[str]:
        """Images and documents."""
        return _files(self.content)

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


class Thoughts(OpenBody):
    """What the model thought, in any of the fields that blocks of thinking have."""

    def text(self, seal: Seal) -> str:
        """The thoughts. An empty `thinking` has them in the `signature`."""
        extras = self.model_extra or {}
        shown = extras.get("thinking")
        if isinstance(shown, str) and shown:
            return shown
        return seal.open(extras.get("signature")) or seal.open(extras.get("data")) or ""


class ThinkingBlock(Thoughts):
    """What the model thought. The prompt leaves it out if the chat template does."""

    type: Literal["thinking"]


class RedactedThinkingBlock(Thoughts):
    """What a model thought, encrypted: the prompt leaves it out unless this server has sealed it."""

    type: Literal["redacted_thinking"]


OF_THOUGHTS = frozenset(f"{ANTHROPIC}.messages.content.{name}" for name in ("thinking", "signature", "data"))
"""The fields of these blocks, which have an effect if the model's template reads thoughts."""


OF_PREFIXES = frozenset(f"{ANTHROPIC}.{place}.cache_control" for place in ("system", "messages.content"))
"""Fields of texts, which have an effect if the model has recurrent layers."""


UserBlock = TypeAliasType(
    "UserBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[FileBlock, Tag("file")]
        | Annotated[ToolResultBlock, Tag("tool_result")],
        _by_block("text", "file", "tool_result"),
    ],
)
AssistantBlock = TypeAliasType(
    "AssistantBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")]
        | Annotated[ToolUseBlock, Tag("tool_use")]
        | Annotated[ThinkingBlock, Tag("thinking")]
        | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
        by_tag(
            "type",
            "text",
            "tool_use",
            "thinking",
            "redacted_thinking",
            error="kind",
            words="a block of type text, tool_use, thinking or redacted_thinking: the models here write text and calls",
        ),
    ],
)


def instructions(content: str | Sequence[SystemBlock]) -> Iterator[dict[str, Any]]:
    """The message of instructions as chat templates read it, without lines about billing. For an empty list there is
    none, so that the template's own stay.
    """
    parts = [content] if isinstance(content, str) else [block.text for block in content]
    if read := [text for part in parts if (text := without_billing(part)) or not part]:
        yield {"role": "system", "content": "\n".join(read)}


def text_of(content: str | Iterable[TextBlock | FileBlock | ToolReferenceBlock]) -> str:
    """The content as one text: blocks are lines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


ID_PREFIX = "toolu_"
"""Begins the ids of calls. Chat templates read the rest, whose length some of them check."""


class SystemInput(OpenBody):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: SystemContent

    def without_effect(self) -> list[str]:
        """A text that begins with a line about billing."""
        return ["content"] if isinstance(self.content, str) and self.content.startswith(BILLING) else []

    def for_template(self, seal: Seal) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it."""
        return instructions(self.content)


class UserInput(OpenBody):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: TextOrList[str, Annotated[LongList[UserBlock], Field(min_length=1)]]

    def without_effect(self) -> list[str]:
        """Images and documents."""
        return _files(self.content)

    def for_template(self, seal: Seal) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it: each answer of a tool is a message of its own."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for block in self.content:
            if isinstance(block, TextBlock | FileBlock):
                yield {"role": "user", "content": block.text}
            else:
                call_id = block.tool_use_id.removeprefix(ID_PREFIX)
                yield {"role": "tool", "content": block.text, "tool_call_id": call_id}


class AssistantInput(OpenBody):
    """What the model said earlier, and its calls. The last message may be the beginning of the answer."""

    role: Literal["assistant"]
    content: TextOrList[str, LongList[AssistantBlock]]

    def for_template(self, seal: Seal) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it, but that the arguments of its calls are still text."""
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        calls = [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.text(seal) for block in self.content if isinstance(block, Thoughts)]
        thought = "\n".join(filter(None, thoughts))
        yield {
            "role": "assistant",
            "content": text_of(texts),
            **({"reasoning_content": thought} if thought else {}),
            **({"tool_calls": calls} if calls else {}),
        }


MessageInput = TypeAliasType(
    "MessageInput",
    Annotated[
        Annotated[SystemInput, Tag("system")]
        | Annotated[UserInput, Tag("user")]
        | Annotated[AssistantInput, Tag("assistant")],
        by_tag(
            "role", "system", "user", "assistant", error="role", words="a message of the role user, assistant or system"
        ),
    ],
)


def _references(messages: Iterable[MessageInput]) -> Iterator[ToolReferenceBlock]:
    """The tools that searches have found, in the order of the conversation."""
    for message in messages:
        blocks = message.content if isinstance(message, UserInput) and not isinstance(message.content, str) else ()
        for block in blocks:
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                yield from (each for each in block.content if isinstance(each, ToolReferenceBlock))


def chat_of(system: str | Sequence[SystemBlock] | None, messages: Sequence[MessageInput], seal: Seal) -> Chat:
    """The conversation as chat templates read it. Messages of one role that follow each other are one."""
    chat: Chat = [] if system is None else [*instructions(system)]
    for message in messages:
        for each in message.for_template(seal):
            last: dict[str, Any] = chat[-1] if chat else {"role": None}
            if last["role"] == each["role"] != "tool" and "tool_calls" not in last:
                last["content"] += f"\n{each.pop('content')}"
                if thought := last.get("reasoning_content"):
                    each["reasoning_content"] = "\n".join(filter(None, (thought, each.get("reasoning_content"))))
                last |= each
            else:
                chat.append(each)
    return chat or [{"role": "system", "content": ""}]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    call_id = block.id.removeprefix(ID_PREFIX)
    return {"id": call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


MAX_TOOLS = 1024
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]


class ToolDefinition(OpenBody):
    """A tool of the client: its purpose, and the JSON Schema of its input."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_parameters)]
    strict: bool = Field(False, description="the input follows the schema even where the model decides to call")
    defer_loading: bool = Field(False, description="the model reads of it where a tool_reference has found it")

    def to_tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


class McpToolset(OpenBody):
    """The tools of a server that Anthropic's API would call: the model does not see them."""

    reads_extras: ClassVar[bool] = True

    type: Literal["mcp_toolset"]


MessagesTool = TypeAliasType(
    "MessagesTool",
    Annotated[
        Annotated[ToolDefinition, Tag("custom")] | Annotated[McpToolset, Tag("mcp_toolset")],
        Discriminator(lambda tool: "mcp_toolset" if type_of(tool) == "mcp_toolset" else "custom"),
    ],
)


class AutoChoice(OpenBody):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False


class AnyChoice(OpenBody):
    """The model calls at least one tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False


class NamedChoice(OpenBody):
    """The model calls this tool."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(OpenBody):
    """The model calls nothing."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("auto")]
    | Annotated[AnyChoice, Tag("any")]
    | Annotated[NamedChoice, Tag("tool")]
    | Annotated[NoChoice, Tag("none")],
    by_tag("type", "auto", "any", "tool", "none", error="kind", words="an object of type auto, any, tool or none"),
]


class MessagesQuery(WireModel):
    """The query of these routes."""

    beta: bool = Field(False, description="SDKs send it with beta features; it changes nothing", strict=False)


class OutputFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenBody):
    """The form of the answer, and how much the model thinks."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, max_length=32, description="how much the model thinks")


class Metadata(OpenBody):
    """About the call."""

    user_id: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens, as `user`",
    )


class ThinkingConfig(OpenBody):
    """Whether the model thinks before it answers."""

    type: Literal["adaptive", "enabled", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="tokens after which the thoughts end")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks of thinking are empty, and their signatures hold the thoughts"
    )


class ThreadCreate(OpenBody):
    """The server holds the conversation from now on, under the id of the answer."""

    type: Literal["create"]


class ThreadContinue(OpenBody):
    """The call goes on with a conversation that the server holds, and brings only what is new."""

    type: Literal["continue"]
    previous_message_id: str = Field(min_length=1, max_length=256, description="the id of the thread's last answer")


MessageThread = Annotated[
    Annotated[ThreadCreate, Tag("create")] | Annotated[ThreadContinue, Tag("continue")],
    by_tag("type", "create", "continue", error="kind", words="an object of type create or continue"),
]


class PromptFields(OpenBody):
    """The fields that make the prompt of a call, and those that say what it may call."""

    place: ClassVar[str] = ANTHROPIC

    model: str = Field(description="the served model's name, as /v1/models gives it")
    messages: LongList[MessageInput] = Field(
        min_length=1, description="the last may be of the assistant: it is continued"
    )
    system: SystemContent | None = Field(None, description="instructions, in front of the messages")
    tools: list[MessagesTool] = Field(
        default=[], max_length=MAX_TOOLS, description="tools to call; an mcp_toolset is left out"
    )
    tool_choice: ToolChoice | None = Field(None, description="what is called (default: auto)")
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = Field(
        None, description="whether the model thinks (default: as its template has it)"
    )

    _found: set[str] = PrivateAttr(default_factory=set)

    @model_validator(mode="after")
    def _show_found(self) -> Self:
        self.show_found_tools()
        return self

    def show_found_tools(self) -> None:
        """A tool that waits to be found is read where it was found first: what came before it stays as it was."""
        waiting = {tool.name: tool for tool in self._definitions if tool.defer_loading}
        for block in _references(self.messages) if waiting else ():
            if (tool := waiting.pop(block.tool_name, None)) is not None:
                block.show(tool.to_tool())
                self._found.add(tool.name)

    @property
    def _definitions(self) -> list[ToolDefinition]:
        """The tools that the client runs."""
        return [tool for tool in self.tools if isinstance(tool, ToolDefinition)]

    def without_effect(self) -> list[str]:
        """Instructions in one text that begin with a line about billing, tools that nothing has found yet: the model
        reads of them at once, and those that are left out.
        """
        named = ["system"] if isinstance(self.system, str) and self.system.startswith(BILLING) else []
        for index, tool in enumerate(self.tools):
            if isinstance(tool, McpToolset):
                named.append(f"tools.{index}")
            elif tool.defer_loading and tool.name not in self._found:
                named.append(f"tools.{index}.defer_loading")
        return named

    def shown(self, tools: Sequence[Tool]) -> list[Tool]:
        """Those of the tools that the model reads of in front of the conversation."""
        return [tool for tool in tools if tool.name not in self._found]

    def wish(self) -> Wish:
        """What the call says of thinking."""
        effort = None if self.output_config is None else self.output_config.effort
        asked = self.thinking
        return Wish(
            effort=effort,
            effort_field="output_config.effort",
            thinks=None if asked is None else asked.type != "disabled",
            budget=None if asked is None or asked.type == "disabled" else asked.budget_tokens,
            budget_field="thinking.budget_tokens",
        )

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        tools, choice = [each.to_tool() for each in self._definitions], self.tool_choice
        if choice is None or isinstance(choice, NoChoice):
            return ToolUse.of(tools, ToolMode.AUTO if choice is None else ToolMode.NONE, None, parallel=True)
        named = frozenset({choice.name}) if isinstance(choice, NamedChoice) else None
        mode = ToolMode.AUTO if isinstance(choice, AutoChoice) else ToolMode.REQUIRED
        return ToolUse.of(tools, mode, named, parallel=not choice.disable_parallel_tool_use)


class CountTokensBody(PromptFields):
    """A call whose prompt is to be counted."""


class MessagesBody(CallBody, PromptFields):
    """A conversation to go on with."""

    form_field: ClassVar[str] = "output_config"

    max_tokens: int = Field(ge=0, le=MAX_COUNT, description="most tokens to generate; 0 only computes the prompt")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(
        default=[], description="strings that end the answer, whose text ends before them"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    metadata: Metadata | None = None
    thread: MessageThread | None = Field(
        None, description="whether the server holds the conversation, or goes on with one that it holds"
    )

    @property
    def continues_thread(self) -> str | None:
        """The id of the answer that the call goes on from, if it does not bring the conversation up to there."""
        return self.thread.previous_message_id if isinstance(self.thread, ThreadContinue) else None

    def with_thread(
        self, system: SystemContent | None, tools: Sequence[MessagesTool], messages: Iterable[MessageInput]
    ) -> Self:
        """The call with what the thread has that it continues. Raises `FieldOutOfRange` if it brings some of that."""
        for name in ("system", "tools"):
            if getattr(self, name):
                raise FieldOutOfRange.at(name, "a thread keeps those that it was created with: leave them out")
        whole = {"system": system, "tools": tools, "messages": [*messages, *self.messages]}
        body = self.model_copy(update=whole)
        body.show_found_tools()
        return body

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop_sequences`, and `stop` of other APIs."""
        return *self.stop_sequences, *super().stop_strings

    @property
    def user(self) -> str | None:
        """The caller's name for its end user."""
        return None if self.metadata is None else self.metadata.user_id

    def without_effect(self) -> list[str]:
        """Those of the prompt, and a form beside calls that must be made."""
        return [*PromptFields.without_effect(self), *CallBody.without_effect(self)]

    def schema_places(self) -> dict[str, str]:
        """Those of `tools`."""
        named = ((index, tool) for index, tool in enumerate(self.tools) if isinstance(tool, ToolDefinition))
        return {tool.name: f"tools.{index}.input_schema" for index, tool in named}

    def own_form(self) -> Grammar | None:
        """What `output_config` says."""
        form = None if self.output_config is None else self.output_config.format
        return None if form is None else json_form(form.json_schema, "output_config.format.schema")

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return PromptFields.to_tool_use(self)

    @property
    def shows_thoughts(self) -> bool:
        """Whether blocks of thinking have their text."""
        return self.thinking is None or self.thinking.display != "omitted"


def message_prompt(
    body: PromptFields,
    tokens: Tokens,
    support: ToolSupport,
    seal: Seal,
    variables: Mapping[str, Any],
    limit: TextLimit | CharacterLimit | None = None,
) -> ChatPrompt:
    """The conversation in the model's own template, with its tools and those variables. `seal` opens its thoughts.

    Raises `FieldOutOfRange` if the last message cannot be continued or the tools do not fit together, and
    `MalformedRequest` if the template rejects the messages, and `ContextTooLong` if they are certainly too long.
    """
    chat = chat_of(body.system, body.messages, seal)
    continues = body.messages[-1].role == "assistant"
    if continues:
        _check_continued(chat, f"messages.{len(body.messages) - 1}.content")
    tools = body.to_tool_use().tools
    shown = body.shown(tools)
    options: Any = {"add_generation_prompt": not continues, "continue_final_message": continues, "variables": variables}

    def encode(text: str) -> list[int]:
        return tokens.encode(text, add_special_tokens=False, limit=limit)

    def encode_again(changed: Chat) -> list[int]:
        return encode(support.chat_text(changed, shown, **options))

    text = support.chat_text(chat, shown, **options)
    token_ids = encode(text)

    def render_marked() -> str:
        messages = [each.model_copy(update={"content": _marked(each.content)}) for each in body.messages[:-1]]
        last = body.messages[-1]
        if isinstance(last.content, list):  # the end of the prompt has a state anyway
            last = last.model_copy(update={"content": [*_marked(last.content[:-1]), *last.content[-1:]]})
        marked = chat_of(_marked(body.system), [*messages, last], seal)
        return support.chat_text(mark_instructions(marked), shown, **options)

    ends = support.prefix_ends(text, token_ids, render_marked)
    return ChatPrompt(chat, tools, encode_again, token_ids, support.opening(text), prefix_ends=ends)


def _marked(content: Any) -> Any:
    """The content, or the instructions, with a mark after each text that has `cache_control`."""
    if not isinstance(content, list):
        return content
    return [
        block.model_copy(update={"text": block.text + PREFIX_END})
        if isinstance(block, TextBlock) and (block.model_extra or {}).get("cache_control") is not None
        else block
        for block in content
    ]


def _check_continued(chat: Chat, field: str) -> None:
    if "tool_calls" in chat[-1]:
        raise FieldOutOfRange.at(field, "its calls need answers of type tool_result after them")
    text = chat[-1]["content"]
    if not text or text[-1].isspace():
        raise FieldOutOfRange.at(field, "an answer can only continue a text that does not end in white space")
