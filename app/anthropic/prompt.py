"""From the fields of a call to the tokens of its prompt."""

from app.anthropic.bodies import PromptFields
from app.anthropic.messages import Chat, chat_of
from app.domain.errors import FieldOutOfRange
from app.text.token_lengths import CharacterLimit, TextLimit
from app.text.tokenizer import Tokens
from app.tools.support import ToolSupport


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
