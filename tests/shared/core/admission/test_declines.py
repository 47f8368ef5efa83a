"""Tests that admission, once a request is declined, offers none like it for a while."""

from shared.core.admission.declines import FORGET_S, KINDS_LIMIT, TRY_S, Declines
from shared.vocabulary import Slo
from tests.shared.core.pooled import NOW, pooled


def declined(**more: object) -> Declines:
    declines = Declines()
    declines.declined(pooled("a.1", **more), NOW)
    return declines


def test_one_that_is_no_easier_is_not_tried() -> None:
    assert not declined().tries(pooled("a.2"), NOW + 0.1)
    assert not declined().tries(pooled("a.2", prompt_tokens=91), NOW + 0.1)


def test_one_that_may_be_easier_is_tried() -> None:
    for record in (
        pooled("a.2", prompt_tokens=89),
        pooled("a.2", max_tokens=9),
        pooled("b.2"),
        pooled("a.2", importance=2.0),
        pooled("a.2", slo=Slo(ttft_s=2.0)),
        pooled("a.2", tier="batch"),
    ):
        assert declined().tries(record, NOW + 0.1)


def test_while_all_are_declined_one_is_tried_each_half_second() -> None:
    declines, tried = declined(), 0
    for n in range(1000):
        now = NOW + n / 100.0
        if declines.tries(pooled(f"a.{n}"), now):
            tried += 1
            declines.declined(pooled(f"a.{n}"), now)
    assert 0.9 * 10.0 / TRY_S <= tried <= 10.0 / TRY_S


def test_each_that_is_held_lets_one_more_try_and_each_time_adds_one() -> None:
    declines = declined()
    for allowed in range(1, 4):
        now = NOW + allowed * TRY_S
        tried = [n for n in range(100) if declines.tries(pooled(f"a.{n}"), now)]
        assert len(tried) == allowed
        for n in tried:
            declines.held(pooled(f"a.{n}"))
    declines.declined(pooled("a.0"), now)
    assert not declines.tries(pooled("a.1"), now)


def test_two_seconds_after_the_last_decline_everything_is_tried() -> None:
    declines = declined()
    assert all(declines.tries(pooled(f"a.{n}"), NOW + FORGET_S + 0.01) for n in range(100))


def test_it_remembers_so_many_kinds_at_most() -> None:
    declines = Declines()
    for n in range(KINDS_LIMIT + 10):
        declines.declined(pooled(f"t{n}.1"), NOW)
    assert declines.tries(pooled("t0.2"), NOW)
    assert not declines.tries(pooled(f"t{KINDS_LIMIT}.2"), NOW)
