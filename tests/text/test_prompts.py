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
    settings = Settings()
    return load_tokens(resolve("random:tiny-llama", cache_dir=settings.cache_dir))


@pytest.fixture(scope="module")
def smollm2() -> Tokens:
    return load_tokens(resolve("smollm2-135m-instruct", cache_dir=Settings().cache_dir.expanduser()))


def whole_conversation(tokens: Tokens) -> list[int]:
    """The chat template's own rendering of everything: the oracle."""
    return tokens.render_chat([*FIRST, {"role": "assistant", "content": REPLY}, *SECOND])


def check_second_turn_equals_a_full_render(tokens: Tokens, end: str) -> None:
    reply = tokens.encode(REPLY, add_special_tokens=False)
    ended = tokens.encode(end, add_special_tokens=False)
    assert len(ended) == 1
    for history in (tokens.render_chat(FIRST) + reply, tokens.render_chat(FIRST) + reply + ended):
        assert history + following_token_ids(SECOND, tokens, history[-1]) == whole_conversation(tokens)


def test_turns_by_messages_add_up_to_the_whole_conversation(byte_tokens: Tokens) -> None:
    check_second_turn_equals_a_full_render(byte_tokens, "<|im_end|>")


@pytest.mark.model
def test_turns_by_messages_add_up_with_smollm2s_template(smollm2: Tokens) -> None:
    check_second_turn_equals_a_full_render(smollm2, "<|im_end|>")


@pytest.mark.model
def test_the_default_system_prompt_is_written_once(smollm2: Tokens) -> None:
    """SmolLM2's template puts a system prompt in front of a conversation that has none."""
    assert "system" in smollm2.decode(smollm2.render_chat(FIRST), skip_special_tokens=False)
    following = following_token_ids(SECOND, smollm2, last_token_id=0)
    assert "system" not in smollm2.decode(following, skip_special_tokens=False)


@pytest.mark.model
def test_a_system_message_of_the_clients_own_goes_through(smollm2: Tokens) -> None:
    following = following_token_ids([{"role": "system", "content": "Be brief."}, *SECOND], smollm2, last_token_id=0)
    assert "Be brief." in smollm2.decode(following)


def body(**fields: object) -> GenerateBody:
    return GenerateBody.model_validate(fields)


def test_a_prompt_gets_the_leading_special_token_only_at_the_start(byte_tokens: Tokens) -> None:
    assert byte_tokens.bos_token_id is not None
    fresh = new_token_ids(body(prompt="ab"), byte_tokens, [], 512, 4096)
    later = new_token_ids(body(prompt="ab"), byte_tokens, [1, 2], 512, 4096)
    assert fresh == [byte_tokens.bos_token_id, *later]
    assert byte_tokens.decode(later) == "ab"


def test_token_ids_are_taken_as_they_are(byte_tokens: Tokens) -> None:
    assert new_token_ids(body(token_ids=[511, 0]), byte_tokens, [1], 512, 4096) == [511, 0]
    with pytest.raises(FieldOutOfRange, match="at most 511"):
        new_token_ids(body(token_ids=[512]), byte_tokens, [], 512, 4096)


def test_a_template_that_drops_earlier_replies_is_no_bug_of_the_server(
    monkeypatch: pytest.MonkeyPatch, byte_tokens: Tokens
) -> None:
    def last_only(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return messages[-1]["content"]

    monkeypatch.setattr(byte_tokens, "chat_text", last_only)
    with pytest.raises(MalformedRequest, match="earlier replies") as refused:
        following_token_ids(SECOND, byte_tokens, last_token_id=0)
    assert refused.value.param == "messages"


def test_messages_without_a_chat_template_are_refused() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = None
    byte_tokens = Tokens(ModelTokenizer.of(tokenizer), frozenset())
    messages = [{"role": "user", "content": "hi"}]
    for history in ([], [1]):
        with pytest.raises(MalformedRequest, match="chat template"):
            new_token_ids(body(messages=messages), byte_tokens, history, 512, 4096)
