"""Tests of SLOs-Serve with a draft model: draft lengths (appendix D), the cost of the draft model's
reading, and learned acceptance.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy.chunk import decodes_of
from shared.policy.seam import Choice, Drafts, Observation
from shared.policy.slos_serve.batch import MARGIN_S
from shared.policy.slos_serve.draft_length import (
    AGAIN,
    LATE_WINDOWS,
    LONGEST,
    WINDOW_TOKENS,
    Acc,
    Acceptance,
    Lengths,
    best_lengths,
    drafting_s,
    expected_tokens,
    fastest,
    in_each,
    plain_tokens,
    prefill_tokens,
    sure_tokens,
    token_s,
    verifying,
)
from shared.policy.slos_serve.policy import SlosServe
from tests.shared.policy.slos_serve.slos_serving import decoding, policy, waiting
from tests.shared.policy.views import Linear, Row, entries, view

DRAFT = Draft(Linear(), 0.05, 0.05)


class Flat(Linear):
    """A profile: an iteration takes as long with any tokens."""

    def batch_s(self, shape: BatchShape) -> float:
        return 0.010


@given(
    n=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    tight=st.sampled_from([0.012, 0.02, 0.04]),
    alpha=st.floats(0.3, 0.9),
    acc=st.sampled_from([expected_tokens, sure_tokens]),
    owed_s=st.tuples(st.floats(0.0, 0.005), st.floats(0.0, 0.005)),
)
def test_lengths_are_the_best_of_all_there_are_and_pay_for_what_the_draft_has_still_to_read(
    n: tuple[int, int],
    tight: float,
    alpha: float,
    acc: Callable[[float], np.ndarray],
    owed_s: tuple[float, float],
) -> None:
    """Brute force over the paper's objective: batch time min TPOT Acc(s), prefill left over per
    second; less what is owed per token.
    """
    tpot_s, made = (tight, 0.1), acc(alpha)

    def rate(tokens: tuple[int, ...]) -> float:
        batch_s = min(tpot_s[tier] * made[tokens[tier]] for tier in (0, 1) if n[tier])
        now_s = sum(owed_s[tier] * tokens[tier] for tier in (0, 1) if tokens[tier] > 1)
        return (
            prefill_tokens(Linear(), DRAFT, Lengths(tokens, batch_s), n, 300.0, MARGIN_S + now_s)
            / batch_s
        )

    got = best_lengths(
        Linear(), DRAFT, tpot_s, n, 300.0, Acc(made, expected_tokens(alpha)), MARGIN_S, owed_s
    )
    if not any(n):
        assert got.tokens == (1, 1)
        return
    lengths = range(1, LONGEST + 1)
    best = max(
        rate(tokens)
        for tokens in itertools.product(lengths if n[0] else [1], lengths if n[1] else [1])
    )
    batch_s = tight if n[0] else 0.1
    plain = plain_tokens(Linear(), in_each(n, tpot_s, batch_s), batch_s, 300.0, MARGIN_S) / batch_s
    assert got.drafts == (best > plain) or max(best, plain) < 0
    assert not got.drafts or rate(got.tokens) == best


@given(n=st.integers(1, 40), length=st.integers(2, LONGEST), fraction=st.floats(0.0, 0.5))
def test_what_is_prefilled_beside_drafts_leaves_the_draft_model_the_time_to_read_it(
    n: int, length: int, fraction: float
) -> None:
    draft, lengths = Draft(Linear(), fraction, fraction), Lengths((length,), 0.15)
    tokens = prefill_tokens(Linear(), draft, lengths, (n,), 300.0, MARGIN_S)
    target_s = Linear().batch_s(verifying((n,), (length,), 300.0).with_chunk(int(tokens), 0))
    assert (
        target_s + drafting_s(draft, (n,), (length,), 300.0) + int(tokens) * token_s(draft.read_s)
        <= 0.15 - MARGIN_S + 1e-9
    )
    free = prefill_tokens(Linear(), Draft(Linear(), 0.0, 0.0), lengths, (n,), 300.0, MARGIN_S)
    assert tokens <= free
    assert prefill_tokens(Flat(), DRAFT, lengths, (n,), 300.0, MARGIN_S) > 0
    one_of_two = prefill_tokens(
        Linear(), draft, Lengths((length, 1), 0.15), (n, n), 300.0, MARGIN_S
    )
    assert one_of_two <= prefill_tokens(
        Linear(), None, Lengths((1, 1), 0.15), (n, n), 300.0, MARGIN_S
    )


@given(
    n=st.integers(1, 60),
    tpot_s=st.sampled_from([0.008, 0.014, 0.03, 0.1]),
    alpha=st.floats(0.3, 0.9),
)
def test_with_nothing_to_prefill_decodes_end_as_soon_as_their_pace_allows(
    n: int, tpot_s: float, alpha: float
) -> None:
    acc = Acc(sure_tokens(alpha), expected_tokens(alpha))
    got = fastest(Linear(), DRAFT, (tpot_s,), (n,), 300.0, acc, MARGIN_S)

    def seconds(s: int) -> float:
        return Linear().batch_s(verifying((n,), (s,), 300.0)) + drafting_s(DRAFT, (n,), (s,), 300.0)

    keep = [
        s for s in range(1, LONGEST + 1) if seconds(s) + MARGIN_S <= tpot_s * max(acc.made[s], 1.0)
    ]
    (chosen,) = got.tokens
    assert acc.mean[chosen] / seconds(chosen) == pytest.approx(
        max(acc.mean[s] / seconds(s) for s in keep or range(1, LONGEST + 1))
    )
    assert got.batch_s == tpot_s or seconds(chosen) + MARGIN_S > tpot_s, (
        "no request relies on luck where it is not needed"
    )


def test_a_window_of_ten_tokens_comes_in_time_as_surely_as_it_says() -> None:
    rng = np.random.default_rng(3)
    assert sure_tokens(0.3).tolist() == [0.0] + [1.0] * LONGEST, (
        "with drafts as bad as these no time can be relied on"
    )
    for alpha in (0.5, 0.7, 0.9):
        sure, mean = sure_tokens(alpha), expected_tokens(alpha)
        assert sure[1] == 1.0
        assert (np.diff(sure) >= 0).all() and (sure <= mean + 1e-9).all()
        for tokens in (2, 4, LONGEST):
            batches = round(WINDOW_TOKENS / sure[tokens])
            drawn = np.minimum(rng.geometric(1 - alpha, (100_000, batches)), tokens)
            assert np.mean(drawn.sum(axis=1) < WINDOW_TOKENS) <= 1.3 * LATE_WINDOWS
            assert np.mean(drawn[:, 1:].sum(axis=1) < WINDOW_TOKENS) > LATE_WINDOWS, (
                "one batch less is too few"
            )


def test_a_verifying_decode_costs_what_the_books_charge_for_it() -> None:
    tokens, counts = (3, 1), (2, 4)
    seen = view([decoding(n, context=300) for n in range(6)])
    assert verifying(counts, tokens, 300.0) == decodes_of(seen, np.arange(6)).with_drafts(
        np.array([2, 2], dtype=np.int32), np.array([300, 300], dtype=np.int32)
    )


def speculating(rows: Sequence[Row], by: SlosServe | None = None, **more: object) -> Choice:
    return (by or policy()).plan(replace(view(rows, **more), draft=DRAFT))[0]  # type: ignore[arg-type]


def test_decodes_draft_where_their_tpot_is_near_a_step_and_loose_ones_draft_less() -> None:
    rows = [decoding(n, tbt_s=0.014, context=20) for n in range(4)] + [
        decoding(9, tbt_s=0.05),
        waiting(10, ttft_s=9.0),
    ]
    choice = speculating(rows)
    got = entries(choice)
    assert choice.speculation is not None and choice.speculation.method == "chain"
    assert got[0] > 1
    assert got[9] < got[0]
    assert choice.speculation.depth.tolist()[:5] == (choice.caps - 1).tolist()[:5]
    assert choice.speculation.budget_tokens == choice.caps[:5].sum()
    assert speculating(rows, policy(speculate="never")).speculation is None
    assert speculating(rows, free=3).speculation is None


def test_a_request_that_has_fallen_behind_verifies_more_until_it_has_caught_up() -> None:
    """Both requests have had five tokens. The first token of one came 4 TPOTs ago, that of the
    other 8.
    """
    rows = [
        decoding(n, tbt_s=0.02, arrived_s=-since_s) for n, since_s in enumerate([0.08, 0.16, 0.9])
    ]
    decodes = [*rows, *(decoding(n, tbt_s=0.02, arrived_s=-0.08) for n in range(3, 9))]
    got = entries(speculating(decodes, policy(speculate="paper")))
    assert got[1] > got[0]
    assert got[2] == got[0]  # past rescue


def test_acceptance_is_learned_from_the_drafts_that_were_tried() -> None:
    learned = Acceptance()
    none = np.array([0])
    for _ in range(500):  # of 3 drafts, 1 accepted: two were tried
        learned.observe(
            Drafts(
                tbt_s=np.array([0.05]),
                application=none,
                drafted=np.array([3]),
                accepted=np.array([1]),
            )
        )
    assert 0.5 < learned.alpha < 0.54
    assert expected_tokens(0.5)[:4].tolist() == [0.0, 1.0, 1.5, 1.75]


def test_drafts_end_where_none_is_accepted_and_are_tried_again_for_a_few_iterations() -> None:
    by, rows = policy(), [decoding(n, tbt_s=0.1) for n in range(32)]
    shape = BatchShape(decodes=32, decode_context=32 * 500)

    def drafts(accepted: int, alike: int = 1) -> bool:
        """One iteration, or as many as are alike; of the drafts so many are accepted."""
        speculation = speculating(rows, by).speculation
        if speculation is None:
            by.observe(Observation(0.0, shape, 0.01, 0.01, iterations=alike))
            return False
        each = speculation.depth.astype(np.int64)
        seen = Drafts(np.full(32, 0.1), np.zeros(32), each, np.minimum(each, accepted))
        by.observe(Observation(0.0, shape, 0.01, 0.01, drafts=seen))
        return True

    assert drafts(accepted=0)
    lost = sum(drafts(accepted=0) for _ in range(50))
    assert lost < 20, "they end"
    assert not any(drafts(accepted=0, alike=100) for _ in range(AGAIN // 100 - 1))
    tried = sum(drafts(accepted=0, alike=100) for _ in range(AGAIN // 100))
    assert 1 <= tried < 20, "they are tried again, and end again"
    assert sum(drafts(accepted=9, alike=100) for _ in range(AGAIN // 50)) > AGAIN // 200, (
        "they stay"
    )


def test_what_was_seen_before_a_planner_took_over_does_not_end_drafts_for_ever() -> None:
    learned, before = Acceptance(), [0.05, 0.02]
    learned.begin(before)
    assert learned.alpha < 0.1
    learned.forget(AGAIN)
    learned.begin(before)  # as before every plan
    assert learned.alpha > 0.5
