"""Tests of the forecast of replicas needed."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.scaling.loss import MOST, deviations, lost
from shared.core.scaling.scaling import EARNED_S, HELD_S, MAY_MISS, ScalingCore
from shared.core.scaling.tally import ArrivalTally
from shared.core.scaling.tier_load import KEPT_S
from shared.core.scaling.trend import LATE_S, trend_of
from shared.schemas import Announce, Digest, Ended, Record, ReplicasNeeded, Verdict
from shared.vocabulary import FinishReason, RecordState, ReplicaId, RequestKey, ServiceClass, Slo

CHAT, BATCH = Slo(ttft_s=2.0, tbt_s=0.1), Slo(ttlt_s=86_400.0)


def announce(name: str = "r1", **more: Any) -> Announce:
    return Announce(
        replica=ReplicaId(name), incarnation="1", at_unix_s=0.0, model="m", engine="sim",
        profile="a100-llama3-8b", pool="", kv_blocks=1000, block_tokens=16, context_tokens=8192,
        max_slots=64, epoch=0, **more,
    )  # fmt: skip


def record(tier: str, slo: Slo, prompt_tokens: int) -> Record:
    return Record(
        key=RequestKey("t.1"), body_key="", owner="a", state=RecordState.ACTIVE, attempt=0,
        service_class=ServiceClass.STANDARD, tier=tier, slo=slo, importance=1.0, application="",
        session="", arrived_unix_s=0.0, expires_unix_s=172_800.0, prompt_tokens=prompt_tokens,
        max_tokens=1024, stream_subject="",
    )  # fmt: skip


def digest(name: str, at_unix_s: float, *, accepting: bool = True) -> Digest:
    return Digest(
        replica=ReplicaId(name), incarnation="1", planner="p", at_unix_s=at_unix_s, model="m",
        pool="", waiting=0, running=0, best_effort=0, waiting_prefill_tokens=0, backlog_s=0.0,
        kv_blocks=1, kv_free_blocks=1, free_slots=1, surplus=True, accepting=accepting,
    )  # fmt: skip


def verdict(*, met: bool, output_tokens: int = 50) -> Verdict:
    return Verdict(
        finish_reason=FinishReason.STOP, slo_met=met, relegated=not met,
        service_class=ServiceClass.STANDARD, prompt_tokens=1, output_tokens=output_tokens,
        attempts=1, ttft_s=0.1, worst_tbt_s=0.1, mean_tpot_s=0.1, ttlt_s=1.0, ended_unix_s=0.0,
    )  # fmt: skip


class Load:
    """A core with a second of arrivals at a time."""

    def __init__(self, warm_up_s: float = 30.0) -> None:
        self.core, self.now_s = ScalingCore(warm_up_s, 0.0), 0.0
        self.core.announced(announce())
        self._tally = ArrivalTally(lambda _: "m")

    def second(self, requests: dict[str, int], slos: dict[str, Slo]) -> ReplicasNeeded:
        for tier, count in requests.items():
            for _ in range(count):
                self._tally.add(record(tier, slos[tier], 1000))
        self.now_s += 1.0
        for work in self._tally.take():
            self.core.arrived(work, self.now_s)
        return self.core.needed("m", self.now_s)

    def seconds(self, n: int, tier: str, count: int, slo: Slo) -> ReplicasNeeded:
        for _ in range(n):
            needed = self.second({tier: count}, {tier: slo})
        return needed


def test_twice_the_load_needs_twice_the_replicas_and_the_tier_that_asks_is_named() -> None:
    some, twice = Load().seconds(300, "chat", 20, CHAT), Load().seconds(300, "chat", 40, CHAT)
    assert some.tier == twice.tier == "chat"
    assert some.replicas >= 2
    assert twice.replicas == pytest.approx(2 * some.replicas, abs=1)
    assert "chat and what is due sooner" in some.why


def test_work_that_is_due_tomorrow_asks_for_nothing_before_its_time() -> None:
    load = Load()
    # five replicas full of work each second, and a day for it
    assert load.seconds(120, "batch", 70, BATCH).replicas == 1
    load.now_s += 86_400.0 - 600.0  # ten minutes are left, and nothing was done
    asked = load.core.needed("m", load.now_s)
    assert asked.replicas > 1
    assert asked.tier == "batch"


def test_a_load_that_grows_is_met_as_it_will_be_when_a_replica_has_started() -> None:
    now, later = Load(warm_up_s=30.0), Load(warm_up_s=300.0)
    for n in range(250):
        near = now.second({"chat": n // 5}, {"chat": CHAT})
        far = later.second({"chat": n // 5}, {"chat": CHAT})
    assert near.ahead_s == 120.0
    assert far.ahead_s == 300.0
    assert far.replicas > near.replicas


@pytest.mark.parametrize("warm_up_s", [30.0, 300.0])
def test_a_fall_of_half_a_minute_is_taken_for_chance_however_long_a_replica_starts(
    warm_up_s: float,
) -> None:
    load = Load(warm_up_s)
    high = load.seconds(200, "chat", 60, CHAT).replicas
    load.now_s += KEPT_S  # all that came is forgotten
    counts = [load.second({}, {}).replicas for _ in range(40)]
    assert counts[0] == counts[-1] == 1
    load = Load(warm_up_s)
    load.seconds(200, "chat", 60, CHAT)
    for n in range(400):
        count = load.second({}, {}).replicas
        assert count <= high
        if n < LATE_S:
            assert count >= high - 1
    assert count < high


def test_the_more_miss_the_larger_is_the_reserve_and_an_hour_s_misses_count() -> None:
    def asked(missed: int, met: int) -> float:
        """The replicas that are asked for, not rounded, after so many ends."""
        load = Load()
        for n in range(300):
            load.second({"chat": 40 * (n % 2)}, {"chat": CHAT})
        for good, count in ((False, missed), (True, met)):
            for _ in range(count):
                ended = Ended(tier="chat", verdict=verdict(met=good, output_tokens=200))
                load.core.ended(ended, load.now_s)
        return float(load.core.needed("m", load.now_s).why.split()[-2])

    hour = round(MAY_MISS * 20 * EARNED_S)
    assert asked(hour // 2, 0) > asked(0, 0) > asked(0, 50 * hour)
    assert asked(3 * hour, 0) == asked(2 * hour, 0)
    assert asked(100, 9_900) == pytest.approx(asked(0, 0)), "as many missed as may"


def test_while_more_missed_than_may_replicas_are_kept_for_the_next_burst() -> None:
    load = Load()
    high = load.seconds(300, "chat", 60, CHAT).replicas
    for _ in range(50):
        load.core.ended(Ended(tier="chat", verdict=verdict(met=False)), load.now_s)
    for _ in range(int(HELD_S) - 1):
        kept = load.second({"chat": 1}, {"chat": CHAT})
    assert kept.replicas == high
    assert kept.why.endswith(" s ago, and 50 requests too many missed their SLO")
    for _ in range(5000):
        load.core.ended(Ended(tier="chat", verdict=verdict(met=True)), load.now_s)
    assert load.second({"chat": 1}, {"chat": CHAT}).replicas < high


def test_a_core_that_has_heard_nothing_yet_stops_no_replica() -> None:
    load = Load()
    for name in ("r1", "r2", "r3"):
        load.core.heard(digest(name, 1.0), 1.0)
    silent = load.core.needed("m", 1.0)
    assert [need.replicas for need in silent.tiers] == [3], "the metric says so, too"
    first = load.second({"chat": 1}, {"chat": CHAT})
    assert first.replicas == first.tiers[0].replicas == 3
    assert "not known yet" in first.why
    assert load.seconds(100, "chat", 1, CHAT).replicas == 1


def test_requests_refused_at_the_door_are_load_too() -> None:
    quiet, refusing = Load(), Load()
    quiet.seconds(300, "chat", 20, CHAT)
    for _ in range(300):
        refusing.second({"chat": 20}, {"chat": CHAT})
        refusing.core.ended(Ended(tier="chat", requests=20), refusing.now_s)
    some = quiet.core.needed("m", quiet.now_s).replicas
    assert refusing.core.needed("m", refusing.now_s).replicas >= 2 * some - 1


def test_replicas_that_drain_or_are_silent_do_not_serve() -> None:
    core = ScalingCore(30.0, 0.0)

    for name, at_unix_s in (("r1", 100.0), ("r2", 100.0), ("r3", 91.0)):
        core.heard(digest(name, at_unix_s), 100.0)
    core.heard(digest("r4", 100.0, accepting=False), 100.0)
    assert core.needed("m", 100.0).serving == 2
    assert core.needed("m", 100.0).replicas == 1
    assert core.needed("m", 100.0).why == "nothing comes"


@given(st.floats(1e-4, 0.39))
def test_the_reserve_loses_what_it_may(loss: float) -> None:
    assert lost(deviations(loss)) == pytest.approx(loss, abs=1e-5)


def test_the_loss_of_a_normal_load_is_that_of_its_integral() -> None:
    assert lost(0.0) == pytest.approx(1 / math.sqrt(2 * math.pi))
    assert lost(1.0) == pytest.approx(0.08332, abs=1e-5)
    assert deviations(1.0) == 0.0
    assert deviations(0.0) == pytest.approx(MOST, abs=1e-6)


@given(st.floats(0.1, 5.0), st.floats(0.0, 0.05))
def test_a_straight_load_is_continued(level: float, slope: float) -> None:
    work = level + slope * np.arange(200)
    trend = trend_of(work, 100.0)
    assert trend.now == pytest.approx(level + slope * 199, rel=1e-6)
    assert trend.ahead == pytest.approx(level + slope * 299, rel=1e-3)


def test_a_jump_counts_before_the_line_has_risen() -> None:
    work = np.concatenate((np.full(270, 1.0), np.full(30, 5.0)))
    rng = np.random.default_rng(1)
    assert trend_of(work + rng.normal(0, 0.3, 300), 120.0).now > 4.0
