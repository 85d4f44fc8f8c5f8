from __future__ import annotations

import pytest

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.model_tokenizer import ModelTokenizer
from app.model_store.resolve import resolve
from app.routers.prompts import following_token_ids, new_token_ids
from app.settings import Settings
from app.text.tokenizer import Tokens, load_tokens
from app.wire.turns import GenerateBody

FIRST = [{"role": "user", "content": "What is 2 + 2?"}]
REPLY = "4, as far as I know."
SECOND = [{"role": "user", "content": "And 3 + 3?"}]


@pytest.fixture(scope="module")
def byte_tokens() -> Tokens:
    return load_tokens(resolve("random:tiny-llama", cache_dir=Settings().cache_dir))


def check_second_turn_equals_a_full_render(tokens: Tokens) -> None:
    reply = tokens.encode(REPLY, add_special_tokens=False)
    (end,) = tokens.encode("<|im_end|>", add_special_tokens=False)
    whole = tokens.render_chat([*FIRST, {"role": "assistant", "content": REPLY}, *SECOND])
    for history in (tokens.render_chat(FIRST) + reply, [*tokens.render_chat(FIRST), *reply, end]):
        assert history + following_token_ids(SECOND, tokens, history[-1]) == whole


def test_turns_by_messages_add_up_to_the_whole_conversation(byte_tokens: Tokens) -> None:
    check_second_turn_equals_a_full_render(byte_tokens)


@pytest.mark.model
def test_so_they_do_with_smollm2s_template_which_writes_a_system_prompt_once(smollm: Tokens) -> None:
    check_second_turn_equals_a_full_render(smollm)
    assert "system" in smollm.decode(smollm.render_chat(FIRST), skip_special_tokens=False)
    following = following_token_ids(SECOND, smollm, last_token_id=0)
    assert "system" not in smollm.decode(following, skip_special_tokens=False)
    own = following_token_ids([{"role": "system", "content": "Be brief."}, *SECOND], smollm, last_token_id=0)
    assert "Be brief." in smollm.decode(own)


def tokens_with(template: str | None) -> Tokens:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = template
    return Tokens(ModelTokenizer.of(tokenizer), frozenset())


def body(**fields: object) -> GenerateBody:
    return GenerateBody.model_validate(fields)


def test_a_prompt_gets_the_leading_special_token_only_at_the_start(byte_tokens: Tokens) -> None:
    fresh = new_token_ids(body(prompt="ab"), byte_tokens, [], 512, 4096)
    later = new_token_ids(body(prompt="ab"), byte_tokens, [1, 2], 512, 4096)
    assert fresh == [byte_tokens.bos_token_id, *later]
    assert byte_tokens.decode(later) == "ab"


def test_token_ids_are_taken_as_they_are(byte_tokens: Tokens) -> None:
    assert new_token_ids(body(token_ids=[511, 0]), byte_tokens, [1], 512, 4096) == [511, 0]
    with pytest.raises(FieldOutOfRange, match="at most 511"):
        new_token_ids(body(token_ids=[512]), byte_tokens, [], 512, 4096)


def test_a_template_that_drops_earlier_replies_is_no_bug_of_the_server() -> None:
    with pytest.raises(MalformedRequest, match="earlier replies") as refused:
        following_token_ids(SECOND, tokens_with("{{ messages[-1].content }}"), last_token_id=0)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("history", [[], [1]])
def test_messages_without_a_chat_template_are_refused(history: list[int]) -> None:
    with pytest.raises(MalformedRequest, match="chat template"):
        new_token_ids(body(messages=FIRST), tokens_with(None), history, 512, 4096)
