"""What is remembered of requests with a key: for a day, and within bounds."""

import pytest

from app.domain.values import SessionId
from app.sessions import keyed
from app.sessions.keyed import KeptAnswer, KeyedRequest, KeyedRequests
from tests.tenants.tenant_files import Clock

DAY_S = 24 * 3600


def answer(size: int) -> KeptAnswer:
    return KeptAnswer(200, (), bytes(size))


def done(requests: KeyedRequests, owner: str | None, key: str, size: int = 1) -> KeyedRequest:
    request = requests.begin(owner, key, b"digest")
    request.session = SessionId("ses_1")
    request.is_done = request.is_answered = True
    requests.end(request, answer(size))
    return request


def test_a_key_is_known_for_a_day() -> None:
    clock = Clock()
    requests = KeyedRequests(clock=clock)
    request = done(requests, None, "k")
    clock.now += DAY_S - 1
    assert requests.find(None, "k") is request
    clock.now += 2
    assert requests.find(None, "k") is None


def test_a_tenant_with_many_keys_forgets_its_own_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "MOST_KEYS", 3)
    requests = KeyedRequests()
    done(requests, "ann", "0")
    for number in range(4):
        done(requests, "bob", str(number))
    assert [requests.find("bob", str(number)) is not None for number in range(4)] == [False, True, True, True]
    assert requests.find("ann", "0") is not None


def test_a_request_that_is_being_answered_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "MOST_KEYS", 2)
    requests = KeyedRequests()
    slow = requests.begin(None, "slow", b"digest")
    slow.is_running = True
    for number in range(4):
        done(requests, None, str(number))
    assert requests.find(None, "slow") is slow


def test_answers_have_a_bound_and_what_was_done_is_known_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "MOST_ANSWERS_BYTES", 160)
    requests = KeyedRequests()
    call = requests.begin(None, "call", b"digest")
    call.is_answered = True
    requests.end(call, answer(10))
    made = [done(requests, None, str(number), 10) for number in range(20)]
    assert requests.find(None, "call") is None, "it can be made again"
    assert [each.answer is not None for each in made] == [False] * 4 + [True] * 16
    assert all(requests.find(None, str(number)) is each for number, each in enumerate(made))
    large = done(requests, None, "large", 11)
    assert large.answer is None
