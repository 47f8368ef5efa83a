"""Slackline where KV is short: the time that prefills without KV leave, who passes them, and whole
runs.
"""

import numpy as np
import pytest

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import Draft
from shared.policy import registry
from shared.policy.seam import Choice
from shared.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.shared.policy.views import BLOCK, Linear, Row, decode, entries, view

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
        Row(slot=50, target=3000, ttft_s=3.0, tbt_s=0.1, ttlt_s=90.0),
        Row(slot=50, target=3000, arrived_s=-3599.0),
        Row(slot=50, target=3000, ttft_s=3.0, tbt_s=0.1, best_effort=True),
    ],
    ids=["with a TTLT", "without a deadline", "best-effort"],
)
def test_others_do_not_pass_what_would_then_wait_for_ever(first: Row) -> None:
    """The second is due later, or is best-effort, too."""
    later = Row(slot=51, target=200, ttft_s=9.0, tbt_s=0.1, best_effort=first.best_effort)
    chosen = entries(planned(first, later, free=100, decodes=[]))
    assert chosen == {}
    assert 50 in entries(planned(first, later, decodes=[]))


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
    assert ours < 0.8, "KV is not short"
    for policy in ("slos_serve", "qoserve", "edf"):
        assert ours >= met(policy) - 0.03, f"seeds {seeds}, {policy}"
