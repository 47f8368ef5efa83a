"""Tests of others' laws of scaling, each on what its page says."""

from itertools import pairwise

import pytest

from loadgen.lab.scaling.days import DAYS, TRACES
from loadgen.lab.scaling.laws import QueueLength, Saturation, Timetable
from loadgen.simulator.elastic.law import Fleet
from shared.schemas import Digest, Record, Verdict
from shared.vocabulary import FinishReason, ReplicaId, ServiceClass, Slo
from tests import made


def fleet(now_s: float, serving: int, *, starting: int = 0, waiting: int = 0) -> Fleet:
    digests = [
        Digest(
            replica=ReplicaId(f"r{n}"), incarnation="1", planner="p", at_unix_s=now_s, model="m",
            pool="", waiting=waiting, running=0, best_effort=0, waiting_prefill_tokens=0,
            backlog_s=0.0, kv_blocks=1, kv_free_blocks=1, free_slots=1, surplus=True,
        )
        for n in range(serving)
    ]  # fmt: skip
    return Fleet(now_s, digests, starting)


def test_a_timetable_asks_a_warm_up_early_and_holds_what_serves_now() -> None:
    table = Timetable([(0.0, 2), (60.0, 5), (120.0, 1)], warm_up_s=30.0)
    asked = [table.wanted(fleet(now_s, 2)) for now_s in (0.0, 29.0, 30.0, 60.0, 89.0, 119.0, 120.0)]
    assert asked == [2, 2, 5, 5, 5, 5, 1]


def test_queue_length_is_followed_up_at_once_and_down_after_300_s() -> None:
    law = QueueLength(2.0)
    assert law.wanted(fleet(0.0, 2, waiting=2)) == 2, "within 10 %"
    assert law.wanted(fleet(15.0, 2, waiting=4)) == 4
    assert law.wanted(fleet(30.0, 2, waiting=100)) == 6, "four more at most"
    assert law.wanted(fleet(300.0, 6)) == 6
    assert law.wanted(fleet(331.0, 6)) == 1, "six were wanted 301 s ago"


def _ended(at_s: float, ttft_s: float) -> Record:
    verdict = Verdict(
        finish_reason=FinishReason.STOP, slo_met=True, relegated=False,
        service_class=ServiceClass.STANDARD, prompt_tokens=1, output_tokens=9, attempts=1,
        ttft_s=ttft_s, worst_tbt_s=0.0, mean_tpot_s=0.0, ttlt_s=1.0, ended_unix_s=at_s,
    )  # fmt: skip
    return made.record("default.1", slo=Slo(ttft_s=1.0, tbt_s=0.1), verdict=verdict)


def test_saturation_goes_up_by_its_ratio_and_down_by_one_in_120_s() -> None:
    law = Saturation()
    law.ended(_ended(0.0, 1.1))
    assert law.wanted(fleet(0.0, 2)) == 4, "1.1 over 0.55 is twice"
    assert law.wanted(fleet(15.0, 4)) == 4, "once in 60 s"
    assert law.wanted(fleet(100.0, 4)) == 6, "in the mean of three it is 0.73"
    assert law.wanted(fleet(115.0, 6)) == 6, "it went up 15 s ago"
    assert law.wanted(fleet(220.0, 6)) == 5
    assert law.wanted(fleet(235.0, 5)) == 5, "once in 120 s"


@pytest.mark.parametrize("name", DAYS)
def test_a_day_is_the_same_for_the_same_seed(name: str) -> None:
    if not TRACES.exists() and name in ("morning, ServeGen", "Azure code, recorded"):
        pytest.skip("the shared traces are not on this machine")
    first, again, other = (DAYS[name](seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(first))
