"""Tests of what a replica learns of sessions: whose KV stays for the next round, and how long."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.core.prefixes.sessions import LEAST, LONGEST_S, Sessions
from shared.perf import profile_file
from shared.schemas import Offer
from shared.vocabulary import Slo
from tests import made

PROFILE = profile_file.load("a100-llama3-8b")
LONG, SHORT = 12_000, 500  # tokens: a second of the profile, and little of one
KV_TOKENS = 100_000


def asked(session: str, tokens: int = LONG, **more: object) -> Offer:
    tenant = more.pop("tenant", "t")
    return made.offer(
        f"{tenant}.{session}",
        session=session,
        prompt_tokens=tokens,
        slo=Slo(ttft_s=1.0),
        **{"application": "agent", **more},
    )


def turn(sessions: Sessions, offer: Offer, at_s: float) -> float:
    """A request that takes no time. Returns how long its KV is to stay."""
    sessions.arrives(offer, at_s)
    keep_s = sessions.keep_s(offer, KV_TOKENS)
    sessions.ended(offer, at_s)
    return keep_s


def taught(gaps_s: list[float], application: str = "agent") -> Sessions:
    """A replica that saw a session of these gaps. All is long ago."""
    sessions, at_s = Sessions(PROFILE), -1000.0
    turn(sessions, asked("first", application=application), at_s)
    for gap_s in gaps_s:
        at_s += gap_s
        turn(sessions, asked("first", application=application), at_s)
    return sessions


def test_kv_stays_as_long_as_nine_of_ten_gaps() -> None:
    sessions = taught([*[1.0] * 9, *[4.0] * 9, 60.0, 60.0])
    assert turn(sessions, asked("next"), 0.0) == 4.0


def test_few_gaps_tell_nothing_and_another_applications_neither() -> None:
    assert turn(taught([1.0] * (LEAST - 2)), asked("next"), 0.0) == 0.0
    assert turn(taught([1.0] * 20), asked("next", application="chat"), 0.0) == 0.0
    assert turn(taught([1.0] * 20), asked("next", tenant="other"), 0.0) == 0.0


def test_kv_that_could_be_computed_again_in_time_is_not_kept() -> None:
    sessions = taught([1.0] * 20)
    assert turn(sessions, asked("next", SHORT), 0.0) == 0.0
    assert turn(sessions, asked("next", LONG), 1.0) == 1.0


def test_where_most_sessions_have_one_round_nothing_is_kept() -> None:
    sessions = taught([1.0] * 20)
    for n in range(40):
        turn(sessions, asked(f"single {n}"), 0.0)
    after_s = LONGEST_S + 1  # they have not gone on
    assert turn(sessions, asked("next"), after_s) == 0.0


def test_requests_without_a_session_and_those_from_elsewhere_are_rounds_of_none() -> None:
    sessions = taught([1.0] * 20)
    assert turn(sessions, asked("", application="agent"), 0.0) == 0.0
    assert turn(sessions, asked("next", left="drained"), 0.0) == 0.0


@given(st.integers(0, 1 << 32))
def test_a_tenant_keeps_no_more_than_its_share_of_the_kv_beside_others(seed: int) -> None:
    rng, sessions = Random(seed), Sessions(PROFILE)
    for tenant in "ab":
        for n in range(20):
            turn(sessions, asked("first", tenant=tenant), -1000.0 + n)
    at_s, until = 0.0, dict[tuple[str, str], tuple[float, int]]()
    for n in range(60):
        at_s += rng.choice([0.0, 0.1, 2.0])
        tenant, session = rng.choice("ab"), str(rng.randint(0, 20))
        offer = asked(session, rng.choice([LONG, 20_000]), tenant=tenant)
        until.pop((tenant, session), None)
        keep_s = turn(sessions, offer, at_s)
        now = {key: rest for key, rest in until.items() if rest[0] > at_s}
        held = {each: sum(n for (of, _), (_, n) in now.items() if of == each) for each in "ab"}
        if keep_s:
            until[tenant, session] = at_s + keep_s, offer.prompt_tokens
            held[tenant] += offer.prompt_tokens
            assert held[tenant] <= KV_TOKENS
            assert sum(held.values()) <= KV_TOKENS or held[tenant] <= KV_TOKENS / 2
