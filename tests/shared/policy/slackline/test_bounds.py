"""Tests of the longest waits of requests in overload, as docs/slackline.md states them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator import simulation
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic, stored_as
from shared.perf.shape import BatchShape
from shared.policy import chunk, registry
from shared.policy.seam import DEFINITIONS, Choice, Observation, Phase, View
from shared.policy.slackline.bounds import FAR_S, LOOSE_S, as_judged
from shared.policy.slackline.policy import OWED, Slackline
from shared.policy.slackline.windows import TEN
from shared.rules.tiers import DEFAULT, DEMO_3, Tier, TierSet
from shared.schemas import Body, Record
from shared.vocabulary import Definition, FinishReason, ServiceClass, Slo
from tests.rings import slow_but
from tests.shared.policy.views import NOW, Row, decode, entries, view

# Requests a second that one A100 carries, roughly.
CARRIED_RPS = {"chatbot": 10.0, "mix": 4.5, "sharegpt": 3.0}
TIERS = {
    "default": DEFAULT,
    "demo-3": DEMO_3,
    "tight": TierSet(
        name="tight",
        default="quick",
        tiers={
            "quick": Tier(slo=Slo(ttft_s=0.5, tbt_s=0.03), share=0.5),
            "chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1), share=0.5),
        },
    ),
    "whole": TierSet(name="whole", default="whole", tiers={"whole": Tier(slo=Slo(ttlt_s=30.0))}),
    "beside": TierSet(
        name="beside",
        default="chat",
        tiers={
            "chat": Tier(slo=Slo(ttft_s=2.4, tbt_s=0.09), share=0.4),
            "whole": Tier(slo=Slo(ttlt_s=30.0), share=0.6),
        },
    ),
    "pace": TierSet(
        name="pace",
        default="chat",
        tiers={
            "chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1), share=0.8),
            "pace": Tier(slo=Slo(tbt_s=0.1), share=0.2),
        },
    ),
}
SEVERAL = TierSet(
    name="several",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1, ttlt_s=20.0), share=0.4),
        "first": Tier(slo=Slo(ttft_s=2.0, ttlt_s=30.0), share=0.3),
        "pace": Tier(slo=Slo(tbt_s=0.06, ttlt_s=30.0), share=0.3),
    },
)
MEAN = DEFINITIONS.index(Definition.MEAN_TPOT)
WINDOWS = DEFINITIONS.index(Definition.MAX_TPOT_10)
TTLT = DEFINITIONS.index(Definition.TTLT)
ARRIVALS_S = 10.0
CLOSE_S = 0.1  # an iteration that was under way
# The best-effort requests of a replica wait for as long as the longest hundred iterations take, and
# for so much more where decodes leave no time; or where the KV holds 24,000 tokens, a few prompts.
FULL_S, LITTLE_KV_S = 2.0, 20.0
LITTLE_KV_BLOCKS = 1500


@dataclass
class Waits:
    """The longest waits that the views of one replica show, in seconds."""

    beyond_first_s: float = 0.0  # a standard request without a token, beyond its TTFT or TTLT
    # from the newest token of a standard decode to the end of the iteration, beyond its pace, two
    # passes of all, and the time that early tokens have earned it
    beyond_pace_s: float = 0.0
    unserved_s: float = 0.0  # best-effort requests, while none of them runs
    iteration_s: float = 0.0  # the longest
    since_unix_s: float = field(default=math.inf)

    def look(self, seen: View, choice: Choice) -> None:
        seen, now = as_judged(seen), seen.start_unix_s
        waits = ~seen.best_effort & (seen.phase != Phase.DECODE) & (seen.generated_tokens == 0)
        due = np.minimum(seen.first_due_unix_s, seen.last_due_unix_s)
        # where `ttlt` judges, it waits for as long as a late first token can be made up for
        dated = waits & ~((seen.definition == TTLT) & ~seen.has_ttlt)
        self.beyond_first_s = max(self.beyond_first_s, _most(now - due[dated]))
        rows = (~seen.best_effort & (seen.phase == Phase.DECODE)).nonzero()[0]
        passes_s = 2 * seen.profile.batch_s(chunk.decodes_of(seen, rows))
        pace_s = np.maximum(np.minimum(seen.tightest_tbt_s[rows], LOOSE_S), passes_s)
        earned_s = _earned_s(seen, rows)
        pace_s = np.maximum(pace_s, np.where(np.isfinite(earned_s), earned_s, 0.0))
        length_s = _length_s(seen, choice)
        ends_unix_s = now + length_s
        self.iteration_s = max(self.iteration_s, length_s)
        gap_s = ends_unix_s - seen.newest_token_unix_s[rows]
        self.beyond_pace_s = max(self.beyond_pace_s, _most(gap_s - pace_s))
        owed = seen.slot[seen.best_effort & (seen.generated_tokens < seen.max_tokens)]
        if not len(owed) or not set(owed.tolist()).isdisjoint(choice.slots.tolist()):
            self.since_unix_s = math.inf
        else:
            self.since_unix_s = min(self.since_unix_s, now)
            self.unserved_s = max(self.unserved_s, now - self.since_unix_s)


def _earned_s(seen: View, rows: chunk.Rows) -> np.ndarray:
    """[rows] the longest time from the newest token to the next one, by what judges the request."""
    by, tbt_s = seen.definition[rows], seen.tbt_s[rows]
    newest = seen.newest_token_unix_s[rows]
    by_mean = seen.first_token_unix_s[rows] + seen.generated_tokens[rows] * tbt_s - newest
    by_deadline = seen.next_due_unix_s[rows] - newest
    return np.select([by == MEAN, by == WINDOWS], [by_mean, TEN * tbt_s], by_deadline)


def _length_s(seen: View, choice: Choice) -> float:
    row_of = {slot: row for row, slot in enumerate(seen.slot.tolist())}
    slots, limits = choice.slots.tolist(), choice.caps.tolist()
    caps = {row_of[slot]: cap for slot, cap in zip(slots, limits, strict=True)}
    decodes = [row for row in caps if seen.phase[row] == Phase.DECODE]
    shape = chunk.decodes_of(seen, np.array(decodes, dtype=np.intp))
    for row, cap in caps.items():
        if seen.phase[row] != Phase.DECODE:
            shape = shape.with_chunk(cap, int(seen.computed_tokens[row]))
    return seen.profile.batch_s(shape)


def _most(seconds: np.ndarray) -> float:
    return float(seconds.max(initial=0.0))


@contextmanager
def watched() -> Iterator[dict[int, Waits]]:
    """The waits of each replica's policy while the context lasts."""
    found: dict[int, Waits] = {}
    plan = Slackline.plan

    def look(self: Slackline, seen: View) -> Sequence[Choice]:
        choices = plan(self, seen)
        found.setdefault(id(self), Waits()).look(seen, choices[0])
        return choices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slackline, "plan", look)
        yield found


# The same loads each time: what bounds the waits here is measured, not derived.
@pytest.mark.slow
@settings(
    deadline=None, max_examples=2, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    tiers=st.sampled_from(sorted(TIERS)),
    workload=st.sampled_from(sorted(CARRIED_RPS)),
    times=st.sampled_from((1.5, 2.0, 3.0, 4.0)),
    important=st.sampled_from((0.0, 0.2)),
    kv_blocks=st.sampled_from((0, LITTLE_KV_BLOCKS)),  # 0: those of the profile
    definition=st.sampled_from(Definition),
    seed=st.integers(0, 999),
)
@example("whole", "chatbot", 4.0, 0.0, 0, Definition.DEADLINE, 1)
# a prompt that KV has no room for is given up in time
@example("demo-3", "sharegpt", 1.5, 0.0, LITTLE_KV_BLOCKS, Definition.DEADLINE, 0)
@example("beside", "chatbot", 3.0, 0.0, 0, Definition.DEADLINE, 0)
@example("beside", "sharegpt", 2.0, 0.0, 0, Definition.MEAN_TPOT, 1)
@example("tight", "chatbot", 2.0, 0.2, 0, Definition.MAX_TPOT_10, 1)
@example("tight", "mix", 2.0, 0.0, 0, Definition.TTLT, 1)
def test_in_overload_every_class_keeps_its_longest_wait_on_a_replica(
    tiers: str,
    workload: str,
    times: float,
    important: float,
    kv_blocks: int,
    definition: Definition,
    seed: int,
) -> None:
    longest_waits_are_kept(
        TIERS[tiers].judged_by(definition), workload, times, important, kv_blocks, seed
    )


@pytest.mark.parametrize("kv_blocks", slow_but([LITTLE_KV_BLOCKS], [0, LITTLE_KV_BLOCKS]))
@pytest.mark.parametrize("definition", slow_but([Definition.DEADLINE], Definition))
def test_in_overload_requests_with_several_bounds_keep_them_too(
    definition: Definition, kv_blocks: int
) -> None:
    longest_waits_are_kept(SEVERAL.judged_by(definition), "chatbot", 3.0, 0.2, kv_blocks, 1)


def longest_waits_are_kept(
    judged: TierSet, workload: str, times: float, important: float, kv_blocks: int, seed: int
) -> None:
    arrivals_s = draw_arrivals(Gaps(), CARRIED_RPS[workload] * times, ARRIVALS_S, seed)
    lengths = named_workload(workload, 8192)
    requests = plan_requests(arrivals_s, lengths, judged, seed, important=important)
    deployment = Deployment(
        "slackline", "a100-llama3-8b", facts=ReplicaFacts(kv_blocks=kv_blocks), draft=0.0
    )
    with watched() as found:
        result = simulate(Traffic(requests, judged, seed), deployment, RunOptions())
    assert result.finished == len(requests)
    for waits in found.values():
        assert waits.beyond_first_s < CLOSE_S
        assert waits.beyond_pace_s < CLOSE_S
        more_s = LITTLE_KV_S if kv_blocks else FULL_S
        assert waits.unserved_s < waits.iteration_s / OWED + more_s


# Each wait is longer than that of any standard request for its first token, so it bounds the first
# token whatever class a request has. Some best-effort ones begin in that time, and some do not.
WAITING = TierSet(
    name="waiting",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1), share=0.6, wait_s=12.0),
        "whole": Tier(slo=Slo(ttlt_s=8.0), share=0.4, wait_s=14.0),
    },
)


def stored_with_its_wait(
    planned: PlannedRequest, tiers: TierSet, *others: Any, **named: Any
) -> tuple[Record, Body]:
    """As admission stores a request that may wait for so long as its tier says."""
    record, body = stored_as(planned, tiers, *others, **named)
    wait_s = tiers.named(planned.tier).wait_s
    assert wait_s is not None
    return replace(record, begin_by_unix_s=record.arrived_unix_s + wait_s), body


@pytest.mark.parametrize(
    ("workload", "hand_back"),
    [pytest.param("chatbot", False, marks=pytest.mark.slow), ("mix", True)],
)
def test_in_overload_a_best_effort_request_begins_in_the_time_that_its_tier_says_or_expires(
    workload: str, hand_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token may be late by the iteration that is under way. Its end may be late by one
    more: the next plan says that it leaves. What gives way before it has begun waits in the pool
    (`hand_back`), or on its replica.
    """
    monkeypatch.setattr(simulation, "stored_as", stored_with_its_wait)
    arrivals_s = draw_arrivals(Gaps(), 2.0 * CARRIED_RPS[workload], ARRIVALS_S, 1)
    requests = plan_requests(arrivals_s, named_workload(workload, 8192), WAITING, 1)
    deployment = Deployment("slackline", "a100-llama3-8b", hand_back=hand_back, draft=0.0)
    with watched() as found:
        verdicts = simulate(Traffic(requests, WAITING, 1), deployment, RunOptions()).verdicts
    late_s = max(waits.iteration_s for waits in found.values())
    began = expired = 0
    for request, verdict in zip(requests, verdicts, strict=True):
        assert verdict is not None
        wait_s = WAITING.named(request.tier).wait_s
        assert wait_s is not None
        if verdict.ttft_s is not None:
            assert verdict.ttft_s <= wait_s + late_s
            began += verdict.service_class is ServiceClass.BEST_EFFORT
        else:
            assert verdict.finish_reason is FinishReason.EXPIRED
            assert verdict.ended_unix_s - request.arrival_s <= wait_s + 2 * late_s
            expired += verdict.replica is not None
    assert began and expired, "on the replica"


def test_a_request_with_a_pace_alone_has_its_first_token_within_an_hour_or_is_best_effort() -> None:
    """Prompts that are due in a minute would keep it waiting for ever."""
    others = [Row(slot=n, target=60_000, ttft_s=60.0, tbt_s=0.1) for n in range(2, 9)]

    def chosen(age_s: float) -> Choice:
        paced = Row(slot=1, arrived_s=-age_s, tbt_s=0.1)
        return registry.make("slackline").plan(view([paced, *others], capacity=100_000))[0]

    assert 1 not in entries(chosen(60.0))
    assert next(iter(entries(chosen(FAR_S - 30.0)))) == 1
    assert 1 in chosen(FAR_S + 1.0).relegate


def test_best_effort_requests_are_owed_time_until_they_have_had_some() -> None:
    """Decodes that take all of the time keep them out; the first moment is theirs."""
    policy, step_s = registry.make("slackline"), 0.05
    full = [decode(Row(slot=n, tbt_s=0.02), context=2000) for n in range(2, 42)]
    waits, prompt = Row(slot=1, best_effort=True), Row(slot=50, target=20_000, ttft_s=60.0)
    policy.observe(Observation(NOW, BatchShape(decodes=1), step_s, step_s))

    def runs(after_s: float, decodes: Sequence[Row]) -> bool:
        seen = view([waits, *decodes, prompt], capacity=100_000)
        seen.start_unix_s += after_s
        seen.newest_token_unix_s = seen.newest_token_unix_s + after_s
        return 1 in entries(policy.plan(seen)[0])

    owed_s = step_s / OWED
    assert not runs(0.0, full)
    assert not runs(owed_s + 0.1, full)
    assert runs(owed_s + 0.2, full[:10])
    assert not runs(owed_s + 0.3, full[:10])


def test_of_best_effort_requests_that_are_owed_time_the_oldest_comes_first() -> None:
    policy, step_s = registry.make("slackline"), 0.05
    policy.observe(Observation(NOW, BatchShape(decodes=1), step_s, step_s))
    old = decode(Row(slot=1, best_effort=True, arrived_s=-9.0, importance=1.0), context=30_000)
    new = decode(Row(slot=2, best_effort=True, arrived_s=-1.0, importance=9.0), context=30_000)
    full = [decode(Row(slot=n, tbt_s=0.02), context=2000) for n in range(3, 23)]
    prompt = Row(slot=50, target=20_000, ttft_s=60.0)
    for after_s in (0.0, step_s / OWED + 0.1):
        seen = view([old, new, *full, prompt], capacity=100_000)
        seen.start_unix_s += after_s
        seen.newest_token_unix_s = seen.newest_token_unix_s + after_s
        choice = policy.plan(seen)[0]
    assert 1 in entries(choice) and 2 not in entries(choice)
