"""Tests of how far the policy slackline drafts: as far as it brings the most tokens a second."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy import chunk, registry
from shared.policy.draft_yields import yields
from shared.policy.seam import Drafts, Ended, Observation, Policy
from shared.policy.slackline.drafts import best_plan
from shared.vocabulary import Definition
from tests.shared.policy.views import NOW, Linear, Row, decode, entries, summary, view


def test_the_yield_of_drafts_is_that_of_the_acceptance_model() -> None:
    rng = np.random.default_rng(1)
    a = 0.7 / 0.3
    path = np.cumprod(rng.beta(a, 1.0, size=(200_000, 8)), axis=1)
    for known in yields():
        # the least probability is not said, but as many are verified as above it
        least = np.quantile(path[:, : known.depth], 1.0 - known.verified / known.depth)
        above = np.where(path[:, : known.depth] >= least, path[:, : known.depth], 0.0)
        assert above.sum(axis=1).mean() == pytest.approx(known.accepted, rel=0.02)


@given(
    decodes=st.integers(1, 80),
    drafting=st.integers(1, 80),
    step=st.floats(0.01, 1.0),
    token_s=st.floats(1e-6, 2e-3),
    scale=st.floats(0.1, 2.0),
    limit_s=st.just(math.inf) | st.floats(0.001, 0.2),
)
def test_no_plan_of_drafts_brings_more_tokens_a_second_than_the_best_one(
    decodes: int, drafting: int, step: float, token_s: float, scale: float, limit_s: float
) -> None:
    class Dear(Linear):
        def batch_s(self, shape: BatchShape) -> float:
            return super().batch_s(shape) + token_s * shape.drafts

    drafting, seen = min(drafting, decodes), view([], profile=Dear())
    draft = Draft(seen.profile, step, step)
    shape = BatchShape(decodes=decodes, decode_context=100 * decodes)
    some = BatchShape(decodes=drafting, decode_context=100 * drafting)
    rates = []
    for known in yields():
        n = round(known.verified * drafting)
        each = n / decodes
        verifying = shape._replace(
            prefill_tokens=n, prefill_sq=each * n, prefill_cross=each * 100 * decodes, drafts=n
        )
        seconds = known.depth * draft.step_s(some) + seen.profile.batch_s(verifying)
        if seconds <= limit_s:
            rates.append((1.0 + scale * known.accepted) / seconds)
    best = best_plan(seen, draft, shape, some, scale, limit_s)
    if best is None:
        assert not rates
    else:
        assert best.seconds <= limit_s
        assert best.tokens_per_s == pytest.approx(max(rates), rel=1e-12)


def test_decodes_draft_while_nothing_waits_and_where_their_pace_needs_it() -> None:
    draft = Draft(Linear(), 0.05, 0.05)
    waiting = Row(slot=9, target=4000, ttft_s=6.0, tbt_s=0.2)

    def drafts(tbt_s: float, *others: Row, definition: Definition = Definition.DEADLINE) -> bool:
        rows = [decode(Row(slot=n, tbt_s=tbt_s, definition=definition)) for n in range(4)]
        seen = view([*rows, *others])
        seen.draft = draft
        return registry.make("slackline").plan(seen)[0].speculation is not None

    assert drafts(0.2)
    assert not drafts(0.2, waiting)
    assert drafts(0.012, waiting)
    assert drafts(0.012, waiting, definition=Definition.MAX_TPOT_10)


def test_a_pace_that_plain_passes_keep_is_no_reason_for_drafts_however_many_decode() -> None:
    """Many decodes need that no more come. Drafts would make the iteration longer."""
    rows = [decode(Row(slot=n, tbt_s=0.024)) for n in range(200)]
    seen = view([*rows, Row(slot=999, target=4000, ttft_s=6.0, tbt_s=0.2)])
    seen.draft = Draft(Linear(), 0.05, 0.05)
    assert seen.profile.batch_s(chunk.decodes_of(seen, np.arange(200))) > 0.024 / 1.3
    assert registry.make("slackline").plan(seen)[0].speculation is None


def taught(*output_tokens: int) -> Policy:
    """The policy after requests with these outputs have ended."""
    policy = registry.make("slackline")
    ended = [Ended("a", 100, 500, tokens) for tokens in output_tokens]
    policy.observe(Observation(NOW, BatchShape(), 0.01, 0.01, ended=ended))
    return policy


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("outputs", ["alike", "short and long"])
def test_an_iteration_with_drafts_is_not_late_for_a_decode_that_cannot_draft_or_may_end_soon(
    read: bool, outputs: str
) -> None:
    """Those of 12 ms draft beside a prompt. Another, of 28 ms, drafts as well if the draft model
    has read its context, else it has one token in the iteration. Where outputs may be short, it
    cannot count on more than one.
    """
    tight = [decode(Row(slot=n, tbt_s=0.012, ttft_s=6.0)) for n in range(4)]
    mean = Definition.MEAN_TPOT
    other = decode(Row(slot=9, tbt_s=0.028, definition=mean), context=20_000, generated=1)
    seen = view([*tight, other, Row(slot=50, target=4000, ttft_s=6.0, tbt_s=0.2)])
    seen.draft = Draft(Linear(), 0.05, 0.05)
    seen.draft_tokens = np.where(seen.slot == 9, 20_000 * read, seen.computed_tokens)
    choice = taught(*([400] * 20 if outputs == "alike" else [2, 400] * 10)).plan(seen)[0]
    assert choice.speculation is not None
    depth = dict(zip(choice.slots.tolist(), choice.speculation.depth.tolist(), strict=True))
    assert depth[0] > 0
    assert (depth[9] > 0) == read
    assert (choice.speculation.lasts_s > 0.029) == (read and outputs == "alike")


@pytest.mark.parametrize("context", [200, 20_000])
def test_drafts_stay_right_while_a_context_is_too_long_to_be_read(context: int) -> None:
    """An iteration in which one is read is the only one of its kind."""
    seen = view([decode(Row(slot=n, tbt_s=0.2), context=context if n else 100) for n in range(2)])
    seen.draft = Draft(Linear(), 0.05, 0.05)
    seen.draft_tokens = np.where(seen.slot == 0, seen.computed_tokens, 0)
    (choice,) = registry.make("slackline").plan(seen)
    assert choice.speculation is not None
    reads = choice.speculation.depth[choice.slots.tolist().index(1)] > 0
    assert reads == (context == 200)
    assert (choice.repeats > 1) == (not reads)


def test_beside_prompts_only_decodes_draft_whose_pace_is_tighter_than_the_iteration() -> None:
    paces_s = [0.012, 0.012, 0.014, 0.2, 0.2, 0.2]
    decodes = [decode(Row(slot=n, tbt_s=tbt_s)) for n, tbt_s in enumerate(paces_s)]
    waiting = Row(slot=9, target=4000, ttft_s=6.0, tbt_s=0.2)

    def depths(*rows: Row) -> list[int]:
        seen = view(rows)
        seen.draft = Draft(Linear(), 0.05, 0.05)
        seen.draft_tokens = seen.computed_tokens  # it has read them
        (choice,) = registry.make("slackline").plan(seen)
        assert choice.speculation is not None
        assert set(choice.slots.tolist()) >= set(range(6))
        by_slot = dict(zip(choice.slots.tolist(), choice.speculation.depth.tolist(), strict=True))
        return [by_slot[n] for n in range(6)]

    assert min(depths(*decodes)) > 0
    beside = depths(*decodes, waiting)
    assert min(beside[:3]) > 0
    assert beside[3:] == [0, 0, 0]


def test_beside_drafts_a_short_prompt_runs_at_once_even_if_a_decode_is_late_for_it() -> None:
    """The iteration of the decodes takes 14.2 ms, and a token is due in 15: that leaves no time for
    a prompt. In a tenth of the 14.2 ms 17 tokens of one run.
    """
    tight = [decode(Row(slot=n, tbt_s=0.012, ttft_s=6.0)) for n in range(4)]
    loose = Row(slot=8, tbt_s=0.2, arrived_s=0.015 - 0.2, definition=Definition.MEAN_TPOT)

    def runs(prompt: Row, *others: Row) -> dict[int, int]:
        seen = view([*tight, decode(loose, generated=1), prompt, *others])
        seen.draft = Draft(Linear(), 0.05, 0.05)
        seen.draft_tokens = seen.computed_tokens  # it has read them
        (choice,) = registry.make("slackline").plan(seen)
        assert choice.speculation is not None
        return entries(choice)

    prompt = Row(slot=9, target=17, ttft_s=6.0, tbt_s=0.2)
    assert runs(prompt)[9] == 17


def test_decodes_in_a_hurry_before_a_ttlt_draft_beside_prompts() -> None:
    def drafts(ttlt_s: float, ttft_s: float) -> bool:
        rows = [decode(summary(n, ttlt_s=ttlt_s)) for n in range(4)]
        seen = view([*rows, Row(slot=9, target=4000, ttft_s=ttft_s, tbt_s=0.2)])
        seen.draft = Draft(Linear(), 0.05, 0.05)
        (choice,) = registry.make("slackline").plan(seen)
        assert choice.speculation is None or entries(choice)[9] > 0
        return choice.speculation is not None

    # an output has up to 500 tokens, and a pass takes 10 ms; the prefill takes 0.4 s
    assert drafts(10.0, 6.0)
    assert drafts(10.0, 0.9)
    assert not drafts(60.0, 6.0)


def test_the_draft_model_first_reads_the_contexts_of_decodes_that_need_it() -> None:
    tight = [decode(Row(slot=n, tbt_s=0.012), context=4000) for n in range(2)]
    loose = [decode(Row(slot=n, tbt_s=0.2), context=2000) for n in range(2, 6)]
    seen = view([*tight, *loose, Row(slot=9, target=4000, ttft_s=6.0, tbt_s=0.2)])
    seen.draft = Draft(Linear(), 0.05, 0.006)
    speculation = registry.make("slackline").plan(seen)[0].speculation
    assert speculation is not None
    assert (speculation.depth[:2] > 0).all()


def drafted(policy: Policy, decodes: int, step: float) -> float:
    """The drafts that the policy has verified, of each of so many decodes on average."""
    seen = view([decode(Row(slot=n, tbt_s=0.4)) for n in range(decodes)], free=20_000)
    seen.draft = Draft(Linear(), step, step)
    seen.draft_tokens = seen.computed_tokens  # it has read them
    [choice] = policy.plan(seen)
    if choice.speculation is None:
        return 0.0
    return choice.speculation.budget_tokens / decodes - 1.0


def test_drafts_that_are_accepted_less_and_less_end_little_by_little() -> None:
    policy, means = registry.make("slackline"), list[float]()
    for _ in range(100):
        means.append(drafted(policy, 16, 0.1))
        none = np.zeros(16, dtype=np.int32)
        rejected = Drafts(np.full(16, 0.4), none, np.full(16, 2, dtype=np.int32), none)
        policy.observe(Observation(NOW, BatchShape(), 0.01, 0.01, drafts=rejected))
    assert means[0] > 1.0
    assert means[-1] == 0.0
    assert all(later <= earlier for earlier, later in pairwise(means))
    assert max(earlier - later for earlier, later in pairwise(means)) < means[0] / 2
    assert len(set(means)) > 3


def test_drafts_give_way_as_more_decodes_share_the_batch() -> None:
    means = [drafted(registry.make("slackline"), 2**n, 0.1) for n in range(9)]
    assert means[0] > 2.0
    assert means[-1] == 0.0
    assert all(later <= earlier + 0.1 for earlier, later in pairwise(means))


def test_a_draft_that_costs_too_much_is_not_used() -> None:
    assert drafted(registry.make("slackline"), 4, 0.1) > 0.0
    assert drafted(registry.make("slackline"), 4, 0.9) == 0.0
