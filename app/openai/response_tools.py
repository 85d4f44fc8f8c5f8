"""Tools of `/v1/responses`: how a client defines them, how the model sees them, and how their calls are told."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.openai.fields import MAX_TOOLS, FunctionDefinition, ToolName
from app.openai.response_items import (
    ApplyPatchCallItem,
    CallItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    LocalShellAction,
    LocalShellCallItem,
    PatchOperation,
    ShellAction,
    ShellCallItem,
    flat_name,
)
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.lark import NotRegular, plain_lark, plain_regex, quoted_lark, quoted_regex
from app.tools.reader import load_json
from app.wire.base import by_tag, type_of
from app.wire.calls import OpenBody, bare

HOSTED = (
    *("code_interpreter", "computer", "file_search", "image_generation", "mcp", "programmatic_tool_calling"),
    *("tool_search", "web_search"),
)
"""Tools that the API's own servers run. Newer versions add to a name, such as `web_search_preview`."""
MAX_GRAMMAR = 65_536
"""Characters of the grammars of all tools. To read so many holds up all other clients for a tenth of a second."""


class FlatFunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class FreeText(OpenBody):
    """Any text."""

    type: Literal["text"]


class TextGrammar(OpenBody):
    """A text that a grammar describes."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR)


TextForm = TypeAliasType(
    "TextForm",
    Annotated[
        Annotated[FreeText, Tag("text")] | Annotated[TextGrammar, Tag("grammar")],
        by_tag("type", "text", "grammar", error="item", words="an object of type text or grammar"),
    ],
)


class CustomTool(OpenBody):
    """A tool whose input is a text. The model writes it as a function's only argument."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: TextForm | None = Field(None, description="the text's form (default: any)")

    def without_effect(self) -> list[str]:
        """A grammar that cannot hold the text of a JSON string. The model reads it all the same."""
        return ["format"] if isinstance(self.format, TextGrammar) and not self._larks else []

    @cached_property
    def _larks(self) -> dict[str, str]:
        """The form of the text as a `Tool` has it; empty: any. A long one takes a second to make."""
        form = self.format
        if isinstance(form, TextGrammar):
            quoted, plain = (quoted_regex, plain_regex) if form.syntax == "regex" else (quoted_lark, plain_lark)
            with suppress(NotRegular):
                return {"lark": quoted(form.definition), "plain_lark": plain(form.definition)}
        return {}

    def to_tool(self) -> Tool:
        """The tool as a function."""
        form, description = self.format, self.description
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        if isinstance(form, TextGrammar):
            about = f"The input must match this {form.syntax} grammar:\n{form.definition}"
            description = about if description is None else f"{description}\n\n{about}"
        return Tool(self.name, description, schema, strict=bool(self._larks), **self._larks)


InnerTool = TypeAliasType(
    "InnerTool",
    Annotated[
        Annotated[FlatFunctionTool, Tag("function")] | Annotated[CustomTool, Tag("custom")],
        by_tag("type", "function", "custom", error="item", words="a tool of type function or custom"),
    ],
)


class NamespaceTool(OpenBody):
    """Tools under a common name. The model sees each as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: ToolName
    description: str = ""
    tools: list[InnerTool] = Field(max_length=MAX_TOOLS)


class ShellTool(OpenBody):
    """Commands that the client runs in a shell."""

    type: Literal["shell"]
    environment: dict[str, Any] | None = Field(None, description="only of type local")


class LocalShellTool(OpenBody):
    """Programs that the client runs."""

    type: Literal["local_shell"]


class ApplyPatchTool(OpenBody):
    """Changes of files, which the client makes."""

    type: Literal["apply_patch"]


class HostedTool(OpenBody):
    """A tool that only the API's own servers run: the model does not see it."""

    reads_extras: ClassVar[bool] = True

    type: str = Field(max_length=64)


FORMS = ("function", "custom", "namespace", "shell", "local_shell", "apply_patch")


def _form_of(tool: object) -> str | None:
    kind = type_of(tool) or ""
    environment = tool.get("environment") if isinstance(tool, dict) else None
    if kind.startswith(HOSTED) or (kind == "shell" and type_of(environment) not in (None, "local")):
        return "hosted"
    return kind if kind in FORMS else None


ResponseTool = TypeAliasType(
    "ResponseTool",
    Annotated[
        Annotated[FlatFunctionTool, Tag("function")]
        | Annotated[CustomTool, Tag("custom")]
        | Annotated[NamespaceTool, Tag("namespace")]
        | Annotated[ShellTool, Tag("shell")]
        | Annotated[LocalShellTool, Tag("local_shell")]
        | Annotated[ApplyPatchTool, Tag("apply_patch")]
        | Annotated[HostedTool, Tag("hosted")],
        Discriminator(
            _form_of,
            custom_error_type="item",
            custom_error_message=f"a tool whose type is one of {', '.join(FORMS)}, or one that a server runs, which is "
            "left out",
        ),
    ],
)


class ToolChosen(OpenBody):
    """One of the tools: by its name, or by its type if that is all it has."""

    type: str = Field(max_length=64)
    name: ToolName | None = None
    namespace: ToolName | None = None


class AllowedToolsChosen(OpenBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ToolChosen] = Field(min_length=1, max_length=MAX_TOOLS)


def _choice_form(choice: object) -> str | None:
    if isinstance(choice, str):
        return "word"
    kind = type_of(choice)
    return kind if kind in (None, "allowed_tools") else "tool"


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[ToolChosen, Tag("tool")]
    | Annotated[AllowedToolsChosen, Tag("allowed_tools")],
    Discriminator(
        _choice_form,
        custom_error_type="tool_choice",
        custom_error_message="none, auto, required, or an object whose type is that of a tool, or allowed_tools",
    ),
]

_COMMAND = {"type": "array", "items": {"type": "string"}}
_TIMEOUT = {"type": "integer", "description": "milliseconds"}
_BUILT_IN = {
    "shell": Tool(
        "shell",
        "Run commands in a shell on the user's machine, one after the other.",
        {
            "type": "object",
            "properties": {"commands": _COMMAND, "timeout_ms": _TIMEOUT, "max_output_length": {"type": "integer"}},
            "required": ["commands"],
        },
    ),
    "local_shell": Tool(
        "local_shell",
        "Run a program on the user's machine. The command is the program and its arguments.",
        {
            "type": "object",
            "properties": {"command": _COMMAND, "working_directory": {"type": "string"}, "timeout_ms": _TIMEOUT},
            "required": ["command"],
        },
    ),
    "apply_patch": Tool(
        "apply_patch",
        "Create, update or delete a file. The diff has a line of @@ before each change; its lines begin with a space, "
        "+ or -. A file that is deleted needs no diff.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string"},
            },
            "required": ["type", "path"],
        },
    ),
}
"""By type: tools whose calls have a form of their own, as the model sees them."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it, and as the client knows it."""

    tool: Tool
    type: str
    name: str | None = None
    """None: the type is its name."""
    namespace: str | None = None

    def call(self, made: FunctionCallItem, status: ItemStatus) -> CallItem:
        """The call that the model has `made`, with all its arguments, in the form of this tool. Arguments that do not
        fit that form stay those of a function: then the client can say so to the model.
        """
        found = load_json(made.arguments)
        if found is None and self.type == "custom":  # it may be cut inside its text
            found = load_json(made.arguments + '"}')
        head: dict[str, Any] = {"call_id": made.call_id, "status": status}
        with suppress(ValidationError):
            match self.type:
                case "custom":
                    text = _only_text(found, made.arguments)
                    return CustomToolCallItem(**head, name=made.name, namespace=self.namespace, input=text)
                case "shell":
                    return ShellCallItem(**head, action=bare(ShellAction.model_validate(found)))
                case "local_shell":
                    return LocalShellCallItem(**head, action=bare(LocalShellAction.model_validate(found)))
                case "apply_patch":
                    operation = bare(PatchOperation.model_validate(found))
                    patch = ApplyPatchCallItem(call_id=made.call_id, operation=operation)
                    # The API knows no incomplete one.
                    return patch if status == "completed" else patch.model_copy(update={"status": "in_progress"})
        return made.model_copy(update={"name": self.name or self.type, "status": status})


def _only_text(found: Any, arguments: str) -> str:
    """The input of a custom tool's call: models may give it another name, or leave the object away."""
    values = list(found.values()) if isinstance(found, dict) else [found]
    text = (
        found.get("input") if isinstance(found, dict) and "input" in found else values[0] if len(values) == 1 else None
    )
    return text if isinstance(text, str) else arguments


def check_grammars(tools: Sequence[ResponseTool]) -> Sequence[ResponseTool]:
    """The tools. Raises ValueError if their grammars are too long together."""
    inner = (each for tool in tools for each in (tool.tools if isinstance(tool, NamespaceTool) else [tool]))
    forms = (each.format for each in inner if isinstance(each, CustomTool))
    total = sum(len(form.definition) for form in forms if isinstance(form, TextGrammar))
    if total > MAX_GRAMMAR:
        raise ValueError(f"the grammars of all tools may have {MAX_GRAMMAR} characters together, not {total}")
    return tools


def offered_tools(tools: Iterable[ResponseTool]) -> list[OfferedTool]:
    """The tools as the model sees them, without those that it cannot have.

    Raises `FieldOutOfRange` for too many, and for grammars that are not understood.
    """
    offered: list[OfferedTool] = []
    for tool in tools:
        match tool:
            case FlatFunctionTool() | CustomTool():
                offered.append(OfferedTool(tool.to_tool(), tool.type, tool.name))
            case NamespaceTool():
                for index, inner in enumerate(tool.tools):
                    made = inner.to_tool()
                    about = [tool.description if index == 0 else None, made.description]
                    text = "\n\n".join(each for each in about if each) or None
                    name = flat_name(tool.name, inner.name)
                    flat = replace(made, name=name, description=text)
                    offered.append(OfferedTool(flat, inner.type, inner.name, tool.name))
            case ShellTool() | LocalShellTool() | ApplyPatchTool():
                offered.append(OfferedTool(_BUILT_IN[tool.type], tool.type))
    if len(offered) > MAX_TOOLS:
        raise FieldOutOfRange.at("tools", f"at most {MAX_TOOLS} with those of namespaces, not {len(offered)}")
    return offered


def schema_places(tools: Iterable[ResponseTool]) -> dict[str, str]:
    """The field of the schema of each function, by the name that the model sees."""
    places = dict[str, str]()
    for index, tool in enumerate(tools):
        if isinstance(tool, FlatFunctionTool):
            places[tool.name] = f"tools.{index}.parameters"
        elif isinstance(tool, NamespaceTool):
            for number, inner in enumerate(tool.tools):
                places[flat_name(tool.name, inner.name)] = f"tools.{index}.tools.{number}.parameters"
    return places


def response_tool_use(
    tools: Sequence[ResponseTool],
    offered: Sequence[OfferedTool],
    choice: str | ToolChosen | AllowedToolsChosen | None,
    *,
    parallel: bool,
) -> ToolUse:
    """What a turn may do with the tools, as they are `offered`. Raises `FieldOutOfRange` if the fields do not fit
    together, and for a choice that demands a tool which is not there, or which only the API's own servers run.
    """
    seen = [each.tool for each in offered]
    match choice:
        case ToolChosen():
            return ToolUse.of(seen, ToolMode.REQUIRED, frozenset({_chosen(offered, choice)}), parallel=False)
        case AllowedToolsChosen(mode=mode):
            wanted = [each for each in choice.tools if not each.type.startswith(HOSTED)]
            if not wanted and mode == "required":
                _chosen(offered, choice.tools[0])
            names = frozenset(_chosen(offered, each) for each in wanted)
            return ToolUse.of(seen, ToolMode(mode), names, parallel=parallel)
        case "required" if not seen and tools:
            left_out = ", ".join(sorted({tool.type for tool in tools}))
            raise FieldOutOfRange.at("tool_choice", f"a call is required, and no server runs {left_out} here")
        case _:
            return ToolUse.of(seen, ToolMode(choice or "auto"), None, parallel=parallel)


def _chosen(offered: Sequence[OfferedTool], choice: ToolChosen) -> str:
    """The model's name of the tool. A tool in a namespace may be chosen by its own name, if no other one has it."""
    if choice.type.startswith(HOSTED):
        message = f"tool_choice: no server runs {choice.type} here: only tools that the client runs can be demanded"
        raise FieldOutOfRange(message, param="tool_choice")
    if choice.name is None:
        found = [each for each in offered if each.name is None and each.type == choice.type]
    else:
        names = [each for each in offered if each.type == choice.type and each.name is not None]
        found = [each for each in names if each.tool.name == flat_name(choice.namespace, choice.name or "")]
        found = found or [each for each in names if each.name == choice.name and choice.namespace is None]
    if len(found) != 1:
        what = choice.type if choice.name is None else repr(choice.name)
        how = "no tool" if not found else "more than one tool"
        raise FieldOutOfRange.at("tool_choice", f"there is {how} {what[:200]} in tools")
    return found[0].tool.name
