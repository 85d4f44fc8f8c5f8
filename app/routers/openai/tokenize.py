"""`/tokenize` and `/detokenize`."""

import asyncio

from fastapi import APIRouter

from app.openai.chat_prompt import chat_prompt
from app.openai.tokenization import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from app.routers.dependencies import ServicesDep, errors
from app.routers.openai.call import check_model
from app.text.tokenizer import Tokens
from app.web.json_body import JsonRoute
from app.wire.base import check_token_ids

router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.post("/tokenize", operation_id="tokenize", responses=errors(400, 404))
async def tokenize(body: TokenizeBody, services: ServicesDep) -> TokenizeAnswer:
    """The tokens that a prompt or a chat becomes."""
    if body.model is not None:
        check_model(services, body.model)
    return await asyncio.to_thread(_tokenize, body, services.tokens, services.info.max_model_len)


@router.post("/detokenize", operation_id="detokenize", responses=errors(400, 404))
async def detokenize(body: DetokenizeBody, services: ServicesDep) -> DetokenizeAnswer:
    """The text of tokens."""
    if body.model is not None:
        check_model(services, body.model)
    check_token_ids(body.tokens, services.info.vocab_size, param="tokens")
    return DetokenizeAnswer(
        prompt=await asyncio.to_thread(services.tokens.decode, body.tokens, skip_special_tokens=False)
    )


def _tokenize(body: TokenizeBody, tokens: Tokens, max_model_len: int) -> TokenizeAnswer:
    token_ids = _encode(body, tokens)
    return TokenizeAnswer(
        count=len(token_ids),
        max_model_len=max_model_len,
        tokens=token_ids,
        token_strs=[tokens.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None,
    )


def _encode(body: TokenizeBody, tokens: Tokens) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return tokens.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return chat_prompt(body.messages, tokens, add_generation_prompt=opens, continue_final_message=continues)
