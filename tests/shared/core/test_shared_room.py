"""Tests of room that tenants share by weight (`Shares`), and of the queue for it (`Line`)."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.core.shared_room import Line, Shares

LIMIT = 12
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}
steps = st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.booleans()), max_size=120)


@given(steps)
def test_a_tenant_within_its_share_is_let_in_whatever_the_others_hold(
    moves: list[tuple[str, bool]],
) -> None:
    shares, held = Shares(LIMIT), Counter[str]()
    for tenant, comes in moves:
        if not comes:
            if held[tenant]:
                shares.give(tenant)
                held[tenant] -= 1
            continue
        present = {name for name in held if held[name]} | {tenant}
        share = LIMIT * WEIGHTS[tenant] / sum(WEIGHTS[name] for name in present)
        if shares.fits(tenant, WEIGHTS[tenant]):
            shares.take(tenant, WEIGHTS[tenant])
            held[tenant] += 1
        else:
            assert held.total() >= LIMIT, "it is refused only where there is no room"
            assert held[tenant] + 1 > share
        assert shares.total == held.total()
        assert held.total() <= LIMIT * (1 + 2 / 3 + 1 / 2)


def test_in_the_line_a_tenant_with_nothing_at_work_waits_for_nobody() -> None:
    line = Line[str](at_once=2)
    for n in range(5):
        line.join("a", 1.0, f"a{n}")
    assert [line.next() for _ in range(3)] == ["a0", "a1", None]
    line.join("b", 1.0, "b0")
    line.join("b", 1.0, "b1")
    assert [line.next() for _ in range(2)] == ["b0", None]
    line.done("a")
    assert line.next() is None, "two are at work"
    line.done("a")
    assert [line.next() for _ in range(2)] == ["a2", None]


def test_in_the_line_tenants_have_turns_by_their_weights() -> None:
    line, served = Line[str](at_once=3), Counter[str]()
    for _ in range(90):
        line.join("a", 1.0, "a")
        line.join("c", 2.0, "c")
    at_work: list[str] = []
    for _ in range(60):
        while (began := line.next()) is not None:
            at_work.append(began)
        done = at_work.pop(0)
        served[done] += 1
        line.done(done)
    assert served == {"a": 20, "c": 40}
