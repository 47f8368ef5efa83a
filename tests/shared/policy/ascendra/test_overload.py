"""Tests of Ascendra in overload, at low-priority (LP) and high-priority (HP) replicas: which
requests it relegates or drops, and how much room relegated ones get.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.ascendra.policy import HP, LP
from shared.policy.ascendra.relegated import SHARE_OF_TIME
from shared.policy.seam import Phase, Rows, View
from shared.schemas import Offer
from shared.vocabulary import Slo
from tests import made
from tests.shared.policy.ascendra.test_ascendra import ascendra, at, chat, planned, seen_views
from tests.shared.policy.views import NOW, Row, decode, entries, shape_of, summary


@pytest.mark.parametrize("pool", [LP, HP, ""])
def test_who_still_waits_past_the_deadline_is_relegated_or_dropped_and_nobody_else(
    pool: str,
) -> None:
    made = [
        chat(0, arrived_s=-1.1),
        chat(1, arrived_s=-0.9),
        Row(slot=2, phase=Phase.PREFILL, computed=16, ttft_s=1.0, arrived_s=-5.0),
        summary(3, ttlt_s=1.0, arrived_s=-1.1),
        chat(4, arrived_s=-1.1, best_effort=True),
        decode(chat(5, arrived_s=-9.0)),
        chat(6, generated=3, arrived_s=-9.0),  # preempted
    ]
    batch, gone = planned(ascendra(), at(pool, made))
    assert (list(batch.relegate), list(batch.release), gone) == ([0, 3], [], [])
    batch, _ = planned(ascendra(overload="drop"), at(pool, made))
    assert (list(batch.relegate), list(batch.release)) == ([], [(0, "dropped"), (3, "dropped")])
    assert not {0, 3} & set(entries(batch))


# ---------------------------------------------------------------- relegated requests

# A quarter of 150 ms. Linear: 10 ms, 50 us for a decode on 200 tokens, 80 us a prefill token and a
# little attention.
ROOM_S = SHARE_OF_TIME * 0.15


@pytest.mark.parametrize(("prompt_tokens", "runs"), [(0, True), (300, True), (400, False)])
def test_a_relegated_decode_sits_out_where_standard_requests_leave_no_time(
    prompt_tokens: int, runs: bool
) -> None:
    made = [decode(chat(0)), decode(chat(1, best_effort=True))]
    if prompt_tokens:
        made.append(chat(2, target=prompt_tokens))
    batch, _ = planned(ascendra(), at(LP, made))
    assert (1 in entries(batch)) == runs
    assert entries(batch)[0] == 1
    assert entries(batch).get(2, 0) == prompt_tokens


def test_relegated_requests_fill_the_batch_size_and_the_tokens_and_no_more() -> None:
    standard = [decode(chat(i), context=16) for i in range(6)]
    late = [decode(chat(10 + i, best_effort=True, arrived_s=-i), context=16) for i in range(4)]
    batch, _ = planned(ascendra(batch_requests=8), at(LP, [*standard, *late]))
    assert list(entries(batch)) == [*range(6), 13, 12], "the first to arrive"
    batch, _ = planned(ascendra(batch_tokens=7), at(LP, [*standard, *late]))
    assert list(entries(batch)) == [*range(6), 13]


@pytest.mark.parametrize("pool", [LP, HP, ""])
def test_a_relegated_prefill_takes_what_is_left_of_the_time_and_no_turn_from_decodes(
    pool: str,
) -> None:
    made = [decode(chat(0)), chat(1, target=5000, best_effort=True)]
    seen = at(pool, made)
    batch, _ = planned(ascendra(), seen)
    assert list(entries(batch)) == [0, 1]
    shape, tokens = shape_of(seen, batch), entries(batch)[1]
    assert seen.profile.batch_s(shape) <= ROOM_S < seen.profile.batch_s(shape.with_chunk(1, tokens))


@given(seen=seen_views, pool=st.sampled_from([LP, HP, ""]))
def test_standard_requests_are_served_as_if_no_relegated_request_waited(
    seen: View, pool: str
) -> None:
    """A relegated request that waits holds no KV; without it the batch has the same entries."""
    here = replace(seen, pool=pool)
    waits = seen.best_effort & (seen.phase == Phase.WAITING)
    rows = {f.name: getattr(here, f.name)[~waits] for f in fields(Rows)}
    batch, gone = planned(ascendra(), here)
    alone, gone_alone = planned(ascendra(), replace(here, **rows))
    standard = set(seen.slot[~seen.best_effort].tolist())
    assert {s: n for s, n in entries(batch).items() if s in standard} == {
        s: n for s, n in entries(alone).items() if s in standard
    }
    assert gone == gone_alone


# ---------------------------------------------------------------- tickets of HP replicas


def offer(name: str = "t.r", **more: object) -> Offer:
    slo = Slo(ttft_s=1.0, tbt_s=0.15)
    return made.offer(name, **{"slo": slo, "arrived_unix_s": NOW, "prompt_tokens": 100, **more})


def test_a_ticket_is_good_for_one_and_only_while_nothing_waits_for_prefill() -> None:
    """A ticket is the notice of an HP replica that it has room for one new request."""
    policy, new, moved = ascendra(), offer(), offer("t.o", left="offloaded")

    def accepted(
        made: Sequence[Row], offers: Sequence[Offer], promised: Sequence[Offer] = ()
    ) -> list[bool]:
        return [a.accepted for a in policy.admit(replace(at(HP, made), promised=promised), offers)]

    running = [decode(chat(i)) for i in range(3)]
    assert accepted(running, [new, offer("t.2")]) == [True, False]
    assert accepted(running, [new], promised=[offer("t.0")]) == [False]
    assert accepted([chat(0)], [new]) == [False]
    assert accepted([chat(0, best_effort=True)], [new]) == [True]
    assert accepted([chat(0)], [moved, offer("t.p", left="offloaded")]) == [True, True]
    assert accepted(running, [new, moved]) == [False, True]
    assert accepted(running, [offer("t.l", prompt_tokens=40_000), new]) == [False, True]
