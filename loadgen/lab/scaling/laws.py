"""The laws of scaling that others use, as far as their pages tell, over a simulated fleet."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np

from loadgen.simulator.elastic.law import Fleet
from shared.core.announced import profile_of
from shared.policy.slackline.prices import Prices, prices_of
from shared.schemas import Announce, Record
from shared.vocabulary import ReplicaId


class Deaf:
    """A law that hears nothing."""

    every_s = 15.0
    prefill: Sequence[ReplicaId] = ()

    def announced(self, announce: Announce) -> None:
        return

    def arrived(self, record: Record) -> None:
        return

    def ended(self, record: Record) -> None:
        return


class Timetable(Deaf):
    """Counts that are known beforehand: (from which second on, replicas), each asked for so early
    that it serves by then.
    """

    every_s = 1.0

    def __init__(self, counts: Sequence[tuple[float, int]], warm_up_s: float) -> None:
        self._from_s = [at_s for at_s, _ in counts]
        self._counts = [count for _, count in counts]
        self._warm_up_s = warm_up_s

    def wanted(self, fleet: Fleet) -> int:
        now = bisect_right(self._from_s, fleet.now_s) - 1
        then = bisect_right(self._from_s, fleet.now_s + self._warm_up_s) - 1
        return max(self._counts[max(now, 0) : max(then, 0) + 1])


class QueueLength(Deaf):
    """Kubernetes' HPA on requests that wait for their first token: ceil(waiting / target), each
    15 s, within 10 % left alone; at most max(100 %, 4) up at once; down to the most that was wanted
    in 300 s.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._wanted: deque[tuple[float, int]] = deque()

    def wanted(self, fleet: Fleet) -> int:
        count = len(fleet.serving) + fleet.starting
        ratio = sum(digest.waiting for digest in fleet.serving) / self._target / count
        wanted = count if abs(ratio - 1.0) <= 0.1 else math.ceil(ratio * count)
        wanted = min(max(wanted, 1), count + max(count, 4))
        self._wanted.append((fleet.now_s, wanted))
        while self._wanted[0][0] < fleet.now_s - 300.0:
            self._wanted.popleft()
        return max(wanted, min(count, max(each for _, each in self._wanted)))


class Saturation(Deaf):
    """llm-d's guide: s is the larger of p90 TTFT and p90 TPOT over their SLOs, at most 2, in the
    mean of 45 s. Above 0.55 up, by s / 0.55 but at most max(100 %, 4) in 60 s; below 0.40 down by 1
    in 120 s. What warms up is credited on the way up. Each request counts by the SLO of its tier.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float, float]] = deque()  # s, TTFT and TPOT over their SLOs
        self._samples: deque[float] = deque(maxlen=3)
        self._up_s = self._down_s = -math.inf

    def ended(self, record: Record) -> None:
        slo, verdict = record.slo, record.verdict
        assert verdict is not None
        if slo.ttft_s is not None and slo.tbt_s is not None and verdict.ttft_s is not None:
            tpot = (verdict.mean_tpot_s or 0.0) / slo.tbt_s
            self._ended.append((verdict.ended_unix_s, verdict.ttft_s / slo.ttft_s, tpot))

    def wanted(self, fleet: Fleet) -> int:
        now_s, count = fleet.now_s, len(fleet.serving) + fleet.starting
        while self._ended and self._ended[0][0] < now_s - 60.0:
            self._ended.popleft()
        p90 = np.quantile([each[1:] for each in self._ended], 0.9, axis=0) if self._ended else [0.0]
        self._samples.append(min(float(max(p90)), 2.0))
        mean = sum(self._samples) / len(self._samples)
        credited = mean * len(fleet.serving) / count
        if credited > 0.55 and now_s - self._up_s >= 60.0:
            self._up_s = now_s
            return min(math.ceil(count * credited / 0.55), count + max(count, 4))
        if mean < 0.40 and now_s - max(self._down_s, self._up_s) >= 120.0:
            self._down_s = now_s
            return max(count - 1, 1)
        return count


class Planner(Deaf):
    """Dynamo's planner: each 180 s a floor for the load that the last two intervals foretell, by
    the profile; each 5 s one more where the prompts that wait take longer than the tightest TTFT,
    one fewer (not below the floor) where one fewer would keep them within half of it.
    """

    every_s = 5.0

    def __init__(self, ttft_s: float, pace_s: float) -> None:
        self._ttft_s, self._pace_s = ttft_s, pace_s
        self._prices: Prices | None = None
        self._work = [0.0, 0.0]  # a second: of the interval before, of this one so far
        self._output, self._ended = 0.0, 0
        self._floor, self._at_s = 1, 0.0

    def announced(self, announce: Announce) -> None:
        self._prices = prices_of(profile_of(announce))

    def arrived(self, record: Record) -> None:
        assert self._prices is not None
        output = self._output / self._ended if self._ended else 200.0
        prices, prompt = self._prices, record.prompt_tokens
        prefill_s = float(prices.prefill_s(np.array(prompt), np.array(0)))
        self._work[1] += prefill_s + output * float(prices.decoding_s(np.array(prompt)))

    def ended(self, record: Record) -> None:
        assert record.verdict is not None
        self._output += record.verdict.output_tokens
        self._ended += 1

    def wanted(self, fleet: Fleet) -> int:
        assert self._prices is not None
        count, serving = len(fleet.serving) + fleet.starting, len(fleet.serving)
        if fleet.now_s - self._at_s >= 180.0:
            rates = [work_s / 180.0 for work_s in self._work]
            share = 1.0 - self._prices.batch_s / self._pace_s
            ahead = max(rates[1], 2 * rates[1] - rates[0]) if self._at_s else rates[1]
            self._floor = max(1, math.ceil(ahead / share))
            self._work, self._at_s = [self._work[1], 0.0], fleet.now_s
        waits_s = sum(digest.backlog_s for digest in fleet.serving) / serving
        if waits_s > self._ttft_s and not fleet.starting:
            count += 1
        elif count > 1 and waits_s * serving / max(serving - 1, 1) < self._ttft_s / 2:
            count -= 1
        return max(count, self._floor)
