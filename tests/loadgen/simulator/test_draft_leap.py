"""Tests of the simulator's leaps where decodes draft: iterations that are computed together give
every figure that single ones give.
"""

from array import array
from random import Random

import numpy as np
import pytest

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, Outage, ReplicaFacts
from loadgen.simulator.iteration.luck import AHEAD_TOKENS, Luck
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.simulator.virtual_worker import VirtualWorker
from shared.columns import pack
from shared.core.replica.events import Acked, Leapt, ReplicaAction, ReplicaEvent
from shared.core.replica.replica import ReplicaCore
from shared.perf import profile_file as profiles
from shared.perf.draft import draft_of
from shared.policy import registry, sarathi
from shared.policy.acceptance import Acceptance
from shared.rules.tiers import DEMO_3, TierSet
from shared.schemas import Body, Hold, Sampling, Selection
from shared.vocabulary import Slo
from tests import made as build
from tests.loadgen import planned
from tests.shared.core.placed_record import placed
from tests.shared.policy.speculating import CHAIN, TREE, Speculating

PROFILE = "a100-llama3-8b"
ROOMY = ReplicaFacts(max_slots=256)
TIGHT = ReplicaFacts(kv_blocks=1100, max_slots=24, context_tokens=8000)


class Counted:
    """Counts the events that replica cores handle while it is installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handle = ReplicaCore.handle
        self.acks = self.leapt = 0

        def counted(
            core: ReplicaCore, event: ReplicaEvent, *, now_unix_s: float
        ) -> list[ReplicaAction]:
            self.acks += isinstance(event, Acked)
            self.leapt += len(event.drafted) if isinstance(event, Leapt) else 0
            return handle(core, event, now_unix_s=now_unix_s)

        monkeypatch.setattr(ReplicaCore, "handle", counted)


def both(
    requests: list[PlannedRequest],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    facts: ReplicaFacts = ROOMY,
    tiers: TierSet = DEMO_3,
    **deployed: object,
) -> None:
    """Run these requests with leaps and without; compare all figures, and what policies learned."""
    runs: list[SimulationResult] = []
    learned, counts = list[list[list[int]]](), list[Counted]()
    for leaps in (True, False):
        made = [Speculating(**words, repeats=50) for words in (CHAIN, TREE)]  # type: ignore[arg-type]
        for name, one in zip(("chain", "tree"), made, strict=True):
            entry = registry.Entry(sarathi.Settings, lambda _, one=one: one)  # type: ignore[misc]
            monkeypatch.setitem(registry.POLICIES, name, entry)
        with monkeypatch.context() as patch:
            counts.append(Counted(patch))
            deployment = Deployment(policy, PROFILE, facts=facts, **deployed)  # type: ignore[arg-type]
            options = RunOptions(keep_times=True, check_every=7, leaps=leaps)
            runs.append(simulate(Traffic(requests, tiers), deployment, options))
        learned.append([each.accepted.tolist() for one in made for each in one.drafts])
    leapt, stepped = runs
    assert counts[1].leapt == 0
    assert counts[0].leapt > 10
    assert counts[0].acks <= counts[1].acks - counts[0].leapt, "what was leapt over was acked"
    assert leapt.token_unix_s == stepped.token_unix_s
    assert leapt.verdicts == stepped.verdicts
    assert learned[0] == learned[1]
    figures = "iterations tokens preempted drafted accepted verifications idle_s simulated_s"
    for figure in figures.split():
        assert getattr(leapt, figure) == getattr(stepped, figure), figure
    assert leapt.busy_s == pytest.approx(stepped.busy_s)


@pytest.mark.parametrize("facts", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("policy", ["chain", "tree", "slackline"])
def test_a_leapt_run_is_the_run_of_single_iterations(
    policy: str, facts: ReplicaFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = planned.drawn("sharegpt", 1.5, 12.0, seed=11, important=0.3)
    both(requests, policy, monkeypatch, facts)


def test_so_is_one_of_two_replicas_of_which_one_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = planned.drawn("sharegpt", 1.5, 8.0, seed=12)
    outages = (Outage(1, 4.0, 2.0),)
    both(requests, "slackline", monkeypatch, replicas=2, outages=outages)


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(max_tokens=900, output_tokens=399), 399),  # it ends
        (Sampling(max_tokens=100), 97),  # in the next it may draft less
        (Sampling(max_tokens=900, thinking_tokens=50), 53),  # its thinking ends
    ],
)
def test_a_leap_ends_where_one_more_iteration_would_be_another(
    sampling: Sampling, tokens: int
) -> None:
    """Each iteration drafts three tokens and makes four, after the first token."""
    announce = build.announce(kv_blocks=1000)
    batch_s = profiles.load(PROFILE).batch_s
    draft = draft_of(profiles.load(PROFILE), 0.05)
    worker = VirtualWorker(announce, batch_s, draft, Acceptance(1.0))
    slo = Slo(ttft_s=1.0, tbt_s=0.1, thinking_tbt_s=0.2 if sampling.thinking_tokens else None)
    record = placed(build.record(slo=slo, max_tokens=sampling.max_tokens), announce.replica, "i")
    hold = Hold(epoch=1, sync=1, slot=0, key=record.key, attempt=record.attempt)
    times = array("d")
    worker.hold(hold, record, Body(prompt=pack([1] * 10), sampling=sampling), times)
    worker.plan(build.plan([0], [10]))
    worker.begin(0.0)
    worker.finish(started_unix_s=0.0, ended_unix_s=1.0, exec_s=1.0, idle_s=0.0)
    column = pack([3])
    selection = Selection(method="chain", depth=column, width=pack([1]), budget_tokens=100)
    worker.plan(build.plan([0], [4], seq=2, selection=selection))
    worker.begin(1.0)
    now_s = 1.0
    while worker.again(now_s, 0.1) is not None:
        now_s += 0.1
    ran = worker.settle()
    assert len(times) == 1 + 4 * len(ran)
    worker.finish(started_unix_s=now_s, ended_unix_s=now_s + 0.1, exec_s=0.1, idle_s=0.0)
    assert len(times) == tokens


def test_luck_is_the_same_however_far_ahead_it_is_drawn() -> None:
    rng, model = Random(1), Acceptance(0.6)
    luck, seeds = Luck(model, 8), np.zeros(8, dtype=np.uint64)
    made = np.zeros(8, dtype=np.int32)
    for round_ in range(60):
        slots = np.array(rng.sample(range(8), rng.randint(1, 8)))
        for slot in slots[:1].tolist() if round_ % 9 == 0 else ():
            seeds[slot], made[slot] = rng.getrandbits(64), rng.randint(0, 50)
            luck.begin(slot, int(seeds[slot]))
        made[slots] += rng.randint(1, AHEAD_TOKENS // 8)
        depth = np.array([rng.randint(0, 5) for _ in slots], dtype=np.int32)
        width = np.array([rng.randint(1, 3) for _ in slots], dtype=np.int32)
        ours = luck.draft(slots, made[slots], depth, width)
        theirs = model.draft(seeds[slots], made[slots], depth, width)
        assert (ours.true == theirs.true).all()
        there = theirs.candidates.there
        assert (ours.candidates.there == there).all()
        assert (ours.candidates.path[there] == theirs.candidates.path[there]).all()
