"""Tests of the policy AdaServe: the need of a request, the depth and width of its drafts, budgets
from the profile, the entries of an iteration, and the paper's experiments in small.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadgen.lab.papers.run import Run, execute
from loadgen.load.workload import ADASERVE, Shape
from loadgen.trials.figures import Figures
from shared.errors import ConfigError
from shared.perf.draft import draft_of
from shared.perf.forms import Attention, PiecewiseTokens
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import chunk, registry
from shared.policy.adaserve.policy import AdaServe, Settings
from shared.policy.adaserve.tree import Bounds, balanced_tokens, least_depth, tree
from shared.policy.need import Paces, needed_tokens
from shared.policy.seam import Choice, Phase, Speculation, View
from shared.rules.tiers import load_tiers
from tests.shared.policy.views import BLOCK, Linear, Row, entries, view, views

PAPER = Bounds(depth_max=8, depth_min=4, width_max=3, c1=0, c2=0)


class Roofline:
    """A profile: 30 ms, however little there is to do; 0.2 ms a token once that is longer. The
    ridge is at 150 tokens.
    """

    name = "roofline"

    def batch_s(self, shape: BatchShape) -> float:
        return max(0.030, 0.0002 * shape.tokens) if shape.tokens else 0.0

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return max(0, min(limit, int(budget_s / 0.0002 + 1e-6) - shape.tokens))


def decoding(slot: int, *, since_first_s: float, generated: int, **more: object) -> Row:
    """A decode whose first token came as it arrived, with 0.1 s a token."""
    values: dict[str, object] = {
        "target": 160,
        "computed": 160,
        "arrived_s": -since_first_s,
        "tbt_s": 0.1,
    }
    return Row(**{"slot": slot, "phase": Phase.DECODE, "generated": generated, **values, **more})  # type: ignore[arg-type]


def seen_with(rows: Sequence[Row], profile: Profile | None = None, **more: object) -> View:
    """A view with a draft model that costs a twentieth."""
    profile = profile or Roofline()
    return replace(view(rows, **{"profile": profile, **more}), draft=draft_of(profile, 0.05))  # type: ignore[arg-type]


def adaserve(**changed: object) -> AdaServe:
    return AdaServe(Settings(**changed))  # type: ignore[arg-type]


def planned(seen: View, policy: AdaServe | None = None) -> Choice:
    (choice,) = (policy or adaserve()).plan(seen)
    return choice


def speculated(choice: Choice) -> Speculation:
    assert choice.speculation is not None
    return choice.speculation


def needs(row: Row, *, iteration_s: float = 0.05) -> float:
    seen = view([row])
    paces = Paces(
        seen.tbt_s,
        seen.last_due_unix_s,
        seen.first_token_unix_s,
        seen.generated_tokens,
        seen.max_tokens,
        seen.best_effort,
    )
    return float(needed_tokens(paces, seen.start_unix_s, iteration_s)[0])


# ---------------------------------------------------------------- what a request needs


@given(st.integers(1, 640), st.integers(2, 200), st.integers(1, 64))
def test_accepting_the_need_puts_the_mean_time_per_token_on_the_slo(
    spent: int, generated: int, took: int
) -> None:
    """Eq. 2: (l + t_spec) / (o + accepted) is TPOT with A(r) accepted, and at most that with none
    where nothing is needed.
    """
    spent_s, iteration_s = spent / 64, took / 64
    need = needs(decoding(0, since_first_s=spent_s, generated=generated), iteration_s=iteration_s)
    mean_s = (spent_s + iteration_s) / (generated - 1 + need)
    assert mean_s == pytest.approx(0.1) if need > 0 else mean_s <= 0.1 + 1e-9


# ---------------------------------------------------------------- depth, width, budget


def test_the_budget_is_the_ridge_of_a_roofline_and_where_tokens_cost_what_a_pass_does() -> None:
    assert balanced_tokens(Roofline()) == 150
    assert balanced_tokens(Linear()) == 124, "10 ms, and 80 us a draft"


@pytest.mark.parametrize(("draft_s", "tokens"), [(0.0, 100), (1e-4, 50), (9e-4, 10)])
def test_the_budget_is_smaller_where_a_verified_draft_costs_more_than_a_prompts_token(
    draft_s: float, tokens: int
) -> None:
    """10 ms, and 100 us a token."""
    attention = Attention(e=0, p1=0, p2=0, d0=0, d1=0, d2=0, v=draft_s)
    priced = PiecewiseTokens(tile=1, knots=(0,), slopes=(1e-4,), c=0.01, attention=attention)
    assert balanced_tokens(priced.profile("priced", 0.0)) == pytest.approx(tokens, abs=2)


def test_the_least_depth_is_what_the_budget_allows_when_as_many_requests_decode_as_may() -> None:
    """The artifact's D_min for Llama-70B: 4, with a budget of 512 tokens and 96 requests."""
    assert least_depth(512, 96, 8) == 4
    assert least_depth(128, 96, 8) == 1, "never less than a level"
    assert least_depth(4096, 96, 8) == 8, "nor more than D_max"


@pytest.mark.parametrize("requests", [1, 5, 40, 90, 149])
def test_a_need_adds_at_most_1_2_mean_shares_of_what_the_roots_leave(requests: int) -> None:
    grown = tree(requests, 150, 150, PAPER)
    assert grown is not None
    assert grown.needed_limit_tokens - 1 <= 1.2 * (150 - requests) / requests
    assert grown.needed_limit_tokens > 1.2 * (150 - requests) / requests


def test_nobody_drafts_where_the_newest_tokens_alone_fill_the_budget() -> None:
    assert tree(150, 150, 150, PAPER) is None
    many = [decoding(slot, since_first_s=1.0, generated=5) for slot in range(150)]
    choice = planned(seen_with(many))
    assert choice.speculation is None and set(entries(choice).values()) == {1}


# ---------------------------------------------------------------- an iteration


@pytest.mark.parametrize(("longest", "depth"), [(5, 5), (12, 8)])
def test_an_engine_that_verifies_chains_alone_gets_chains_no_deeper_than_it_drafts(
    longest: int, depth: int
) -> None:
    decodes = [decoding(slot, since_first_s=1.0, generated=generated) for slot, generated in
               enumerate((5, 30))]  # fmt: skip
    seen = replace(seen_with(decodes), longest_chain=longest)
    choice = planned(seen)
    speculation = speculated(choice)
    assert speculation.depth.tolist() == [depth, depth] and speculation.width.tolist() == [1, 1]
    assert entries(choice) == {0: 1 + depth, 1: 1 + depth}
    # a step of the draft has a token of each request; the first also reads what it lacks
    assert speculation.lasts_s == pytest.approx(0.05 * 0.0002 * 322 + (depth - 1) * 0.0015 + 0.030)
    assert speculated(planned(seen, adaserve(depth_min=8))).depth.tolist() == [depth, depth]


def test_no_request_drafts_beyond_its_last_token() -> None:
    """A pass adds a token of its own to the accepted drafts."""
    almost = [
        decoding(slot, since_first_s=1.0, generated=500 - left)
        for slot, left in enumerate((1, 2, 4, 400))
    ]
    choice = planned(seen_with(almost))
    assert speculated(choice).depth.tolist() == [0, 1, 3, 8]
    assert entries(choice) == {0: 1, 1: 2, 2: 4, 3: 25}
    assert speculated(choice).budget_tokens == 149, (
        "the one that does not draft takes its token from the budget"
    )


def blocks_taken(seen: View, choice: Choice) -> int:
    at = {slot: row for row, slot in enumerate(seen.slot.tolist())}
    of = [(at[slot], cap) for slot, cap in entries(choice).items()]
    top = [
        -(-int(seen.computed_tokens[row] + seen.unsure_tokens[row] + cap) // BLOCK)
        - int(seen.kv_held_blocks[row])
        for row, cap in of
    ]
    return sum(max(0, blocks) for blocks in top)


@given(views, st.booleans())
def test_an_iteration_fits_the_tokens_and_the_kv_there_are(seen: View, drafts: bool) -> None:
    """They fit at the upper bound of every entry, so that the core has nothing to cut. Drafts never
    cost a decode its place.
    """
    seen = replace(seen, draft=draft_of(Linear(), 0.05)) if drafts else seen
    choice = planned(seen)
    running = chunk.decoding(seen)
    plain = set(seen.slot[running.rows].tolist())
    of = entries(choice)
    assert plain <= set(of)
    verified = sum(cap for slot, cap in of.items() if slot in plain)
    if choice.speculation is not None:
        assert choice.speculation.budget_tokens <= balanced_tokens(Linear())
        assert len(choice.speculation.depth) == len(of)
        verified = min(verified, balanced_tokens(Linear()))
    assert sum(cap for slot, cap in of.items() if slot not in plain) + verified <= 1024
    freed = sum(int(seen.kv_held_blocks[seen.slot == slot][0]) for slot in choice.preempt)
    assert blocks_taken(seen, choice) <= seen.kv_free_blocks + freed


# ---------------------------------------------------------------- what it is asked


def test_settings_are_given_by_name_and_bounds_may_not_cross() -> None:
    assert registry.make("adaserve", {"budget_tokens": "512", "depth_max": "10"}).name == "adaserve"
    with pytest.raises(ConfigError, match="depth_min"):
        registry.make("adaserve", {"depth_min": "9"})
    with pytest.raises(ConfigError, match="beam"):
        registry.make("adaserve", {"beam": "4"})


# ---------------------------------------------------------------- what comes of it


TRACE = Run(
    policy="adaserve",
    workload="adaserve",
    rate_rps=2.0,
    duration_s=60,
    tiers=load_tiers("adaserve-3"),
    profile="a100-llama3-70b-tp4",
    definition="mean-tpot",
    context_tokens=8192,
)


@cache
def served(
    policy: str,
    *,
    rate_rps: float = 4.8,
    draft: float = 0.07,
    latency: str = "none",
    **changed: str,
) -> Figures:
    """Section 6.2 in small: Llama-70B on four A100s, 60 % coding, a rate at which plain decodes are
    too slow for it.
    """
    given = structs.replace(
        TRACE,
        policy=policy,
        settings=changed,
        rate_rps=rate_rps,
        duration_s=30,
        draft=draft,
        latency=latency,
    )
    found = execute(given).figures
    assert found is not None and found.finished == found.offered
    return found


@pytest.mark.slow
def test_more_requests_keep_their_pace_than_with_plain_decodes_or_drafts_alike_for_all() -> None:
    """Figure 8, the baselines as in the authors' artifact."""
    ours = served("adaserve")
    sarathi, alike = (
        served("fcfs", chunk_tokens="2048"),
        served("vllm", mode="prefill_first", spec_tokens="6"),
    )
    assert ours.violated * 2 < min(sarathi.violated, alike.violated)
    assert ours.by_tier["coding"].violated_fraction < alike.by_tier["coding"].violated_fraction


@pytest.mark.parametrize(
    ("shape", "mean", "deviation"),
    list(zip(ADASERVE, (132.6, 17.9, 778.9), (63.2, 10.7, 368.5), strict=True)),
)
def test_prompts_are_as_long_as_in_the_traces_of_the_artifact(
    shape: Shape, mean: float, deviation: float
) -> None:
    lengths = [shape.pair(Random(n), 8192) for n in range(20_000)]
    prompts = np.array([one.prompt_tokens for one in lengths])
    assert (prompts.mean(), prompts.std()) == pytest.approx((mean, deviation), rel=0.03)
    assert {one.output_tokens for one in lengths} == {256}
