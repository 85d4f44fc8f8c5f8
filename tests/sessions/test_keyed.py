"""What is remembered of requests with a key: for a day, and within bounds."""

from app.domain.values import SessionId
from app.journal.tables import MOST_KEYS
from app.sessions.keyed import MOST_ANSWERS_BYTES, KeptAnswer, KeyedRequest, KeyedRequests


def answer(size: int) -> KeptAnswer:
    return KeptAnswer(200, (), bytes(size))


def done(requests: KeyedRequests, owner: str | None, key: str, size: int = 1) -> KeyedRequest:
    request = requests.begin(owner, key, b"digest")
    request.session = SessionId("ses_1")
    request.is_done = request.is_answered = True
    requests.end(request, answer(size))
    return request


def test_a_tenant_with_many_keys_forgets_its_own_oldest() -> None:
    requests = KeyedRequests()
    done(requests, "ann", "0")
    for number in range(MOST_KEYS + 1):
        done(requests, "bob", str(number))
    assert [requests.find("bob", str(number)) is not None for number in range(3)] == [False, True, True]
    assert requests.find("ann", "0") is not None


def test_answers_have_a_bound_and_what_was_done_is_known_without_them() -> None:
    requests, largest = KeyedRequests(), MOST_ANSWERS_BYTES // 16
    call = requests.begin(None, "call", b"digest")
    call.is_answered = True
    requests.end(call, answer(largest))
    made = [done(requests, None, str(number), largest) for number in range(20)]
    assert requests.find(None, "call") is None, "it can be made again"
    assert [each.answer is not None for each in made] == [False] * 4 + [True] * 16
    assert all(requests.find(None, str(number)) is each for number, each in enumerate(made))
    large = done(requests, None, "large", largest + 1)
    assert large.answer is None
