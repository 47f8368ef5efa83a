"""Tests of the need of a request, AdaServe's A(r): the tokens that it must make in an iteration to
keep its pace. The worker computes it as the iteration begins, from the tokens made by then.
"""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.worker import WorkerCore
from shared.columns import pack
from shared.core.worker.step import Ran, TurnDone
from shared.policy.need import Pace, calm_until_unix_s, needed_tokens, paces_of
from shared.schemas import BatchPlan, Body, Record, Sampling, Selection
from shared.vocabulary import ReplicaId, Slo
from tests import made
from tests.shared.core.placed_record import placed

REPLICA, PROMPT, MOST, LASTS_S, TBT_S = ReplicaId("r1"), 10, 400, 0.05, 0.1
SLOS = (
    Slo(ttft_s=1.0, tbt_s=TBT_S),
    Slo(ttlt_s=60.0),
    Slo(ttft_s=1.0, tbt_s=TBT_S, thinking_tbt_s=2 * TBT_S),
)


def record(slot: int) -> Record:
    new = made.record(f"t.q{slot}", slo=SLOS[slot], prompt_tokens=PROMPT, max_tokens=MOST)
    return placed(new, REPLICA, "i")


def worker() -> WorkerCore:
    core = made.worker_core(REPLICA, kv_blocks=1000, context_tokens=4096, max_slots=4)
    for slot in range(len(SLOS)):
        sampling = Sampling(max_tokens=MOST, ignore_eos=True, thinking_tokens=20)
        body = Body(prompt=pack([1] * PROMPT), sampling=sampling)
        made.hold(core, slot, record(slot), body)
    return core


def plan(seq: int, slots: list[int], cap: int, depth: int, *, relegated: bytes = b"") -> BatchPlan:
    column = pack([depth] * len(slots))
    drafts = Selection(
        method="slo_then_throughput", depth=column, width=column, budget_tokens=64, lasts_s=LASTS_S
    )
    return made.plan(
        slots,
        [cap] * len(slots),
        replica=REPLICA,
        seq=seq,
        predicted_s=LASTS_S,
        relegated=relegated,
        selection=drafts if depth else None,
    )


def by_pace(now_s: float, first_s: float, made: int, tbt_s: float) -> float:
    """[adaserve] Eq. 2, solved for A(r)."""
    return max((now_s - first_s + LASTS_S) / tbt_s - (made - 1), 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_need_is_of_the_tokens_and_the_instant_when_the_iteration_begins(seed: int) -> None:
    """Each plan reaches the worker while the one before still runs, so its sender cannot know how
    many drafts that one accepts, or when it ends.
    """
    rng, core, every = Random(seed), worker(), [0, 1, 2]
    best_effort = rng.choice([None, 0, 1])
    assert core.plan(plan(1, every, PROMPT, 0)) is None
    now_s, first_s, made = rng.uniform(0, 1), 0.0, dict.fromkeys(every, 0)
    for seq in range(2, 14):
        turn = core.begin(now_unix_s=now_s)
        assert turn is not None
        for work in turn.work if made[0] else ():
            left = MOST - made[work.slot]
            thinks = work.slot == 2 and made[2] < 20
            expected = (
                0.0
                if work.slot == best_effort and seq > 4
                else left * LASTS_S / (60.0 - now_s)
                if work.slot == 1
                else by_pace(now_s, first_s, made[work.slot], 2 * TBT_S if thinks else TBT_S)
            )
            assert work.needed == pytest.approx(expected, rel=1e-6, abs=1e-5)
        leaves = pack([best_effort]) if seq == 4 and best_effort is not None else b""
        assert core.plan(plan(seq, every, 5, 4, relegated=leaves)) is None
        did = {slot: rng.randint(1, 5) if made[slot] else 1 for slot in every}
        ended_s = now_s + rng.uniform(0.01, 0.4)
        done = [
            TurnDone(work.tokens if not made[0] else n, (7,) * n, "", None, int(n > 1))
            for work, n in ((work, did[work.slot]) for work in turn.work)
        ]
        ran = Ran(done, ended_s - now_s)
        core.finish(ran, started_unix_s=now_s, ended_unix_s=ended_s, idle_s=0.0)
        first_s = first_s or ended_s
        made = {slot: made[slot] + did[slot] for slot in every}
        now_s = ended_s + rng.choice([0.0, 0.003])


@given(st.integers(0, 1 << 32))
def test_until_a_calm_ends_no_request_needs_drafts_whatever_it_makes(seed: int) -> None:
    rng = Random(seed)

    def drawn(low: float, high: float) -> float:
        return math.inf if rng.random() < 0.3 else rng.uniform(low, high)

    requests = [
        Pace(drawn(0.03, 0.2), drawn(1, 30), 1.0, rng.randint(1, 300), 400, rng.random() < 0.2)
        for _ in range(rng.randint(1, 6))
    ]
    lasts_s = rng.uniform(0.001, 0.03)
    until_unix_s = calm_until_unix_s(paces_of(requests), lasts_s)
    if until_unix_s < 1.0:
        return
    at_unix_s = rng.choice([until_unix_s, rng.uniform(1.0, until_unix_s)])
    later = [
        pace._replace(generated_tokens=rng.randint(pace.generated_tokens, 400)) for pace in requests
    ]
    assert (needed_tokens(paces_of(later), min(at_unix_s, 1e6), lasts_s) <= 1.0).all()


def test_a_calm_ends_when_the_first_request_is_behind_its_pace() -> None:
    paces = paces_of(
        [Pace(0.1, math.inf, 2.0, 31, MOST, False), Pace(0.2, 60.0, 2.0, 31, MOST, False)]
    )
    until_unix_s = calm_until_unix_s(paces, LASTS_S)
    assert until_unix_s == pytest.approx(2.0 + 31 * 0.1 - LASTS_S)
    assert needed_tokens(paces, until_unix_s + 0.001, LASTS_S)[0] > 1.0
    by_end = paces_of([Pace(math.inf, 20.0, 2.0, 100, MOST, False)])
    assert calm_until_unix_s(by_end, LASTS_S) == pytest.approx(20.0 - (MOST - 100) * LASTS_S)
    assert calm_until_unix_s(by_end, 0.0) == math.inf
