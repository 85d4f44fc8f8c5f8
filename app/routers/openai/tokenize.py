"""`/tokenize` and `/detokenize`."""

from collections.abc import Iterable

from fastapi import APIRouter

from app.openai.chat_prompt import chat_prompt
from app.openai.tokenization import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody, tokenized_limit
from app.routers.dependencies import OwnerDep, Services, ServicesDep
from app.routers.openai.call import check_model
from app.routers.openai.route import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, openai_errors
from app.text.tokenizer import Tokens
from app.tools.support import ToolSupport
from app.wire.base import check_token_ids

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
ANSWERS = {**openai_errors(404), 200: {"headers": IGNORED_DESCRIPTION}}


@router.post("/tokenize", operation_id="tokenize", responses=ANSWERS)
async def tokenize(body: TokenizeBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> TokenizeAnswer:
    """The tokens that a prompt or a chat becomes."""
    ignored.read(body)
    if body.model is not None:
        check_model(services, body.model)
    answer, left_out = await services.side_work.run(owner, _tokenize, body, services)
    ignored.add(left_out)
    return answer


@router.post("/detokenize", operation_id="detokenize", responses=ANSWERS)
async def detokenize(
    body: DetokenizeBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep
) -> DetokenizeAnswer:
    """The text of tokens."""
    ignored.read(body)
    if body.model is not None:
        check_model(services, body.model)
    check_token_ids(body.tokens, services.info.vocab_size, param="tokens")
    text = await services.side_work.run(owner, services.tokens.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeAnswer(prompt=text)


def _tokenize(body: TokenizeBody, services: Services) -> tuple[TokenizeAnswer, Iterable[str]]:
    """The answer, and the fields of messages that the chat template leaves out."""
    tokens = services.tokens
    token_ids, left_out = _encode(body, tokens, services.tool_support, services.info.max_model_len)
    answer = TokenizeAnswer(
        count=len(token_ids),
        max_model_len=services.info.max_model_len,
        tokens=token_ids,
        token_strs=[tokens.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None,
    )
    return answer, left_out


def _encode(
    body: TokenizeBody, tokens: Tokens, support: ToolSupport, max_model_len: int
) -> tuple[list[int], Iterable[str]]:
    limit = tokenized_limit(body.input_field, max_model_len)
    if body.messages is None:
        assert body.prompt is not None
        return tokens.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, limit=limit), ()
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    prompt = chat_prompt(
        body.messages,
        tokens,
        support,
        [tool.to_tool() for tool in body.tools or ()],
        add_generation_prompt=opens,
        continue_final_message=continues,
        limit=limit,
    )
    return prompt.token_ids, prompt.left_out
