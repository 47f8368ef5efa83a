"""Tests of the policy slackline where KV is short: who runs while a prefill finds none, KV for
drafts, offers that would find none, and whole runs.
"""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.policy.seam import Admission, Choice, Observation
from shared.rules.tiers import Tier, TierSet
from shared.schemas import Offer
from shared.vocabulary import Definition, RequestKey, ServiceClass, Slo
from tests.shared.policy.views import BLOCK, NOW, Linear, Row, decode, entries, view

PROMPT = Row(slot=50, target=3000, ttft_s=3.0, tbt_s=0.1)
# two of twenty decodes are due soon
DECODES = [decode(Row(slot=n, tbt_s=0.03 if n < 2 else 0.3)) for n in range(20)]


def planned(
    *rows: Row, free: int | None = None, draft: bool = False, decodes: list[Row] = DECODES
) -> Choice:
    """The choice for these decodes and others. `free`: blocks; None: more than enough."""
    seen = view([*decodes, *rows], free=free)
    if draft:
        seen.draft = Draft(Linear(), 0.05, 0.05)
        seen.draft_tokens = seen.computed_tokens  # it has read them
    return registry.make("slackline").plan(seen)[0]


def test_decodes_that_sit_out_run_where_prefills_find_no_kv() -> None:
    beside = entries(planned(PROMPT))
    assert beside[50] > 0
    assert len(beside) < len(DECODES), "some sit out"
    assert entries(planned(PROMPT, free=100)) == dict.fromkeys(range(20), 1)


def test_decodes_draft_where_prefills_find_no_kv() -> None:
    assert planned(draft=True).speculation is not None
    assert planned(PROMPT, draft=True).speculation is None
    assert planned(PROMPT, free=100, draft=True).speculation is not None


def test_a_prefill_that_finds_no_kv_is_passed_by_one_that_does() -> None:
    small = Row(slot=51, target=200, ttft_s=5.0, tbt_s=0.1)
    chosen = entries(planned(PROMPT, small, free=100))
    assert 50 not in chosen
    assert chosen[51] == 200
    assert 50 in entries(planned(PROMPT, small))


@pytest.mark.parametrize(
    "first",
    [
        Row(slot=50, target=3000, arrived_s=-18.0, ttlt_s=30.0),
        Row(slot=50, target=3000, arrived_s=-3599.0),
        Row(slot=50, target=3000, ttft_s=3.0, tbt_s=0.1, best_effort=True),
    ],
    ids=["a whole answer", "without a deadline", "best-effort"],
)
def test_others_do_not_pass_what_would_then_wait_for_ever(first: Row) -> None:
    """The second is due later, or is best-effort, too."""
    later = Row(slot=51, target=200, ttft_s=19.0, tbt_s=0.1, best_effort=first.best_effort)
    chosen = entries(planned(first, later, free=100, decodes=[]))
    assert chosen == {}
    assert 50 in entries(planned(first, later, decodes=[]))


@pytest.mark.parametrize("draft", [False, True])
def test_a_prefill_that_begins_leaves_kv_for_drafts(draft: bool) -> None:
    """A block for each of twenty decodes to grow by, and two more for the drafts of each."""
    first = Row(slot=51, target=10 * BLOCK, ttft_s=3.0, tbt_s=0.1)
    least = 10 + len(DECODES) * (3 if draft else 1)
    assert 51 in entries(planned(first, free=least, draft=draft))
    waits = planned(first, free=least - 1, draft=draft)
    assert 51 not in entries(waits)
    assert (waits.speculation is not None) == draft, "meanwhile decodes draft"


# ---------------------------------------------------------------- at the door

OFFER = Offer(
    key=RequestKey("t.r"),
    attempt=1,
    service_class=ServiceClass.STANDARD,
    tier="t",
    slo=Slo(ttft_s=1.0, tbt_s=0.1),
    importance=1.0,
    application="a",
    arrived_unix_s=NOW,
    prompt_tokens=1600,  # a hundred blocks
    max_tokens=100,
    next_due_unix_s=NOW + 1.0,
    hops_left=1,
)
# Each decode keeps a quarter of half of 495 tokens, which is four blocks, and one to grow by.
KEPT = 5 * len(DECODES)
FEW = KEPT + 30  # blocks


def answered(
    *offers: Offer, rows: list[Row] = DECODES, free: int = FEW, step_s: float = 0.05
) -> list[Admission]:
    """`step_s`: what iterations took lately."""
    policy = registry.make("slackline")
    policy.observe(Observation(NOW, BatchShape(decodes=20), step_s, step_s))
    return list(policy.admit(view(rows, free=free), offers))


def taken(
    *offers: Offer, rows: list[Row] = DECODES, free: int = FEW, step_s: float = 0.05
) -> list[bool]:
    return [answer.accepted for answer in answered(*offers, rows=rows, free=free, step_s=step_s)]


def test_what_would_find_no_kv_is_declined_while_another_replica_may_be_asked() -> None:
    (answer,) = answered(OFFER)
    assert not answer.accepted
    assert taken(OFFER, free=400) == [True]
    assert taken(replace(OFFER, prompt_tokens=160)) == [True]


def test_at_the_last_replica_it_may_wait_for_kv() -> None:
    assert taken(replace(OFFER, hops_left=0)) == [True]


def test_each_offer_counts_for_those_after_it() -> None:
    second = replace(OFFER, key=RequestKey("t.s"))
    assert taken(OFFER, second, free=KEPT + 120) == [True, False]
    assert taken(OFFER, second, free=KEPT + 220) == [True, True]
    small = replace(second, prompt_tokens=160)
    assert taken(OFFER, small) == [False, True], "what is declined takes no KV"


def test_decodes_that_end_in_time_give_their_kv() -> None:
    """Each has twenty tokens left in the mean: that is a second at 50 ms, and eight at 400."""
    rows = [decode(Row(slot=n, tbt_s=0.3, max_tokens=45), generated=5) for n in range(20)]
    assert taken(OFFER, rows=rows, free=60) == [True]
    assert taken(OFFER, rows=rows, free=60, step_s=0.4) == [False]
    soon = replace(OFFER, slo=Slo(ttft_s=0.16, tbt_s=0.1), next_due_unix_s=NOW + 0.16)
    assert taken(soon, rows=rows, free=60) == [False]
    later = replace(OFFER, slo=Slo(ttft_s=0.6, tbt_s=0.1), next_due_unix_s=NOW + 0.6)
    assert taken(later, rows=rows, free=60) == [False], "enough end in the mean, but not surely"


def test_the_kv_of_best_effort_requests_is_free() -> None:
    rows = [decode(Row(slot=n, best_effort=True)) for n in range(20)]
    assert taken(OFFER, rows=rows, free=0) == [True]


def test_a_whole_answer_is_taken_in_any_case() -> None:
    soon = Slo(ttlt_s=30.0)
    whole = replace(OFFER, slo=soon, arrived_unix_s=NOW - 22.0, next_due_unix_s=math.inf)
    assert taken(whole) == [True]
    first = replace(OFFER, slo=Slo(ttft_s=1.0, ttlt_s=600.0))
    assert taken(first) == [False], "it has a TTFT to keep"


# ---------------------------------------------------------------- whole runs


def served(policy: str, slo: Slo, draft: float, seed: int) -> SimulationResult:
    """Requests of a thousand tokens on a replica with KV for 30,000: there is none for a fifth of
    them or more.
    """
    tiers = TierSet(name="chat", default="chat", tiers={"chat": Tier(slo=slo)})
    arrivals_s = draw_arrivals(Gaps(), 10.0, 30.0, seed)
    requests = plan_requests(arrivals_s, Synthetic((CHATBOT,), 8192), tiers, seed=seed)
    facts = ReplicaFacts(kv_blocks=30_000 // BLOCK, block_tokens=BLOCK)
    deployment = Deployment(policy, "a100-llama3-8b", facts=facts, draft=draft)
    return simulate(Traffic(requests, tiers, seed), deployment)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [0.0, 0.05])
@pytest.mark.parametrize("bound", ["ttft_s", "ttft_x"])
def test_where_kv_is_short_no_other_policy_keeps_many_more(bound: str, draft: float) -> None:
    """Within three points, in the mean of three seeds."""
    window = Definition.MAX_TPOT_10
    slo = {
        "ttft_s": Slo(ttft_s=0.5, tbt_s=0.1, definition=window),
        "ttft_x": Slo(ttft_x=5.0, tbt_s=0.1, definition=window),
    }[bound]
    seeds = (1, 2, 3)

    def met(policy: str) -> float:
        runs = [served(policy, slo, draft, seed) for seed in seeds]
        assert all(run.finished == len(run.verdicts) for run in runs), "every request ends"
        return float(np.mean([run.met_fraction for run in runs]))

    ours = met("slackline")
    assert ours < 0.85, "KV is not short"
    for policy in ("slos_serve", "qoserve", "edf"):
        assert ours >= met(policy) - 0.03, f"seeds {seeds}, {policy}"
