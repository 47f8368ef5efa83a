"""ScalingCore: how many replicas of one model hold the SLOs of its load, now and when a replica
that is started now serves.

The work that is due within a time, by the profile's prices, must fit into the time that replicas
have beside the passes of decodes. docs/scaling.md has the law and its arithmetic.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shared.core.announced import profile_of
from shared.core.load_view import STALE_S
from shared.core.scaling.loss import deviations
from shared.core.scaling.roles import Work, prompts_only
from shared.core.scaling.tally import OTHER
from shared.core.scaling.tier_load import TierLoad
from shared.core.scaling.trend import LATE_S
from shared.errors import ConfigError
from shared.policy.slackline.bounds import LOOSE_S
from shared.policy.slackline.prices import CHUNK_TOKENS, Prices, prices_of
from shared.schemas import Announce, Digest, Ended, ReplicasNeeded, TierNeed, WorkArrived
from shared.vocabulary import MOST_REPLICAS, ReplicaId, Role

AHEAD_S = 120.0  # the least time to look ahead
MAY_MISS = 0.01  # the part of the requests that may miss their SLO
HELD_S = 300.0  # what was asked is kept so long while more missed than may
EARNED_S = 3600.0  # too many misses are made up for within this time, and too few are used up
TIERS_LIMIT = 64
BARE = 0.1  # a replica has at least this part of its time beside passes


class Need(NamedTuple):
    """The replicas that a tier and those due sooner ask for, not rounded. Work in seconds a second:
    what comes, what comes when a replica that is started now serves, and with owed answers and a
    reserve for chance. `due_s`: the time within which that must be done. `share`: the part of a
    replica's time beside passes.
    """

    replicas: float
    now: float
    ahead: float
    work: float
    due_s: float
    share: float

    @property
    def rounded(self) -> int:
        return max(0, math.ceil(self.replicas - 1e-9))


class Asked(NamedTuple):
    at_unix_s: float
    replicas: int
    tier: str
    why: str


class ScalingCore:
    """The forecast of one model. `warm_up_s`: the time from the decision to start a replica until
    it serves. `may_miss`: the part of the requests that may miss their SLO.
    """

    def __init__(self, warm_up_s: float, now_unix_s: float, may_miss: float = MAY_MISS) -> None:
        self._warm_up_s, self._began_unix_s = warm_up_s, now_unix_s
        self._may_miss = may_miss
        self._tiers: dict[str, TierLoad] = {}
        self._digests: dict[ReplicaId, Digest] = {}
        self._prices: Prices | None = None
        self._priced: tuple[str, float] | None = None  # the profile of `_prices`, and its pace
        self._debt = 0.0  # requests that missed their SLO, less those that might; of an hour
        self._asked: deque[Asked] = deque()  # replicas fall: the first is the most that was asked
        self._auto: set[ReplicaId] = set()  # may change their role
        self._move_s = 0.0  # for a token's KV to move; 0: it does not
        self._prefill: tuple[ReplicaId, ...] = ()
        self._roles_until_unix_s = -math.inf

    # ------------------------------------------------------------ what was heard

    def announced(self, announce: Announce) -> None:
        """A worker lives; all of a model are taken to be as fast as the last one heard."""
        self._move_s = announce.kv_move_s
        if announce.role is Role.AUTO and not announce.draining:
            self._auto.add(announce.replica)
        else:
            self._auto.discard(announce.replica)
        priced = (announce.profile, announce.pace)
        if priced == self._priced:
            return
        try:
            profile = profile_of(announce)
        except ConfigError:
            return  # its planner refuses it, too
        self._priced = priced
        self._prices = Prices(*(each * announce.pace for each in prices_of(profile)))

    def heard(self, digest: Digest, now_unix_s: float) -> None:
        if digest.replica in self._digests or len(self._digests) < MOST_REPLICAS:
            self._digests[digest.replica] = digest
        if len(self._digests) > self._serving(now_unix_s):
            self._digests = {
                replica: each
                for replica, each in self._digests.items()
                if now_unix_s - each.at_unix_s <= STALE_S
            }

    def arrived(self, work: WorkArrived, now_unix_s: float) -> None:
        if self._prices is None:
            return
        for came in work.tiers:
            load = self._tiers.get(came.tier)
            if load is None:
                if len(self._tiers) >= TIERS_LIMIT:
                    continue
                load = self._tiers[came.tier] = TierLoad(self._began_unix_s)
            load.arrived(came, self._prices, now_unix_s)

    def ended(self, ended: Ended, now_unix_s: float) -> None:
        """A request has ended, or some were refused at the door, which missed their SLO."""
        load, verdict = self._tiers.get(ended.tier), ended.verdict
        if load is None:
            return
        if verdict is None:
            load.refused(ended.requests, now_unix_s)
        else:
            load.ended(verdict.output_tokens)
        missed = ended.requests if verdict is None or not verdict.slo_met else 0
        self._debt += missed - self._may_miss * ended.requests

    # ------------------------------------------------------------ what follows

    def needed(self, model: str, now_unix_s: float) -> ReplicasNeeded:
        """The replicas needed. What was asked for is kept for LATE_S: so long a jump is taken for
        chance. While more than may have missed their SLO, it is kept for HELD_S: a burst that came
        as a surprise may come again.
        """
        ahead_s = max(AHEAD_S, self._warm_up_s)
        needs = self._needs(now_unix_s, ahead_s)
        tier = max(needs, key=lambda name: needs[name].replicas, default="")
        replicas = max(1, needs[tier].rounded) if tier else 1
        why = _words(tier, needs[tier], ahead_s) if tier else "nothing comes"
        serving = self._serving(now_unix_s)
        if serving > replicas and now_unix_s < self._began_unix_s + LATE_S:
            replicas, tier = serving, tier or OTHER
            why = "so many serve, and it is not known yet what comes"
        while self._asked and self._asked[-1].replicas <= replicas:
            self._asked.pop()
        self._asked.append(Asked(now_unix_s, replicas, tier, why))
        kept_s = HELD_S if self._debt > 0.0 else LATE_S
        while self._asked[0].at_unix_s < now_unix_s - kept_s:
            self._asked.popleft()
        asked = self._asked[0]
        rows = {name: need.rounded for name, need in needs.items()}
        if asked.tier:
            rows[asked.tier] = asked.replicas
        return ReplicasNeeded(
            model=model,
            at_unix_s=now_unix_s,
            replicas=asked.replicas,
            tier=asked.tier,
            why=asked.why + self._kept(asked, now_unix_s),
            tiers=[TierNeed(name, count) for name, count in rows.items()],
            serving=serving,
            ahead_s=ahead_s,
            prefill=self._prompts_only(serving, now_unix_s),
        )

    def _prompts_only(self, serving: int, now_unix_s: float) -> tuple[ReplicaId, ...]:
        """The replicas that are to compute prompts only, for LATE_S, of those that may."""
        may = sorted(each for each in self._auto if each in self._digests)
        if now_unix_s < self._roles_until_unix_s and set(self._prefill) <= set(may):
            return self._prefill
        prices, loads = self._prices, list(self._tiers.values())
        count = 0
        if prices is not None and may and self._move_s:
            pace_s = min([LOOSE_S, *(load.pace_s for load in loads if not load.whole)])
            passes = 1.0 + prices.batch_s / (CHUNK_TOKENS * prices.token_s)
            work = Work(
                prefill_s=sum(load.prefill_s for load in loads) * passes,
                decode_s=sum(load.decode_s for load in loads),
                move_s=sum(load.tokens for load in loads) * self._move_s,
                share=max(1.0 - prices.batch_s / pace_s, BARE),
            )
            count = min(prompts_only(work, serving), len(may))
        self._roles_until_unix_s = now_unix_s + LATE_S
        stay = [each for each in self._prefill if each in may]
        self._prefill = tuple(sorted([*stay, *(each for each in may if each not in stay)][:count]))
        return self._prefill

    def _kept(self, asked: Asked, now_unix_s: float) -> str:
        ago_s = now_unix_s - asked.at_unix_s
        if ago_s < 1.0:
            return ""
        kept = f"; that was {ago_s:.0f} s ago"
        if ago_s > LATE_S:
            kept += f", and {self._debt:.0f} requests too many missed their SLO"
        return kept

    def _loss(self, rate: float) -> float:
        """The part that the reserve may lose: so much more or less than may miss as fewer or more
        did, of what comes within EARNED_S.
        """
        hour = self._may_miss * rate * EARNED_S
        self._debt = min(max(self._debt, -hour), hour)
        return self._may_miss * (1.0 - self._debt / hour) if hour else self._may_miss

    def _needs(self, now_unix_s: float, ahead_s: float) -> dict[str, Need]:
        """The need of each tier, beside those that are due sooner."""
        prices = self._prices
        if prices is None:
            return {}
        needs: dict[str, Need] = {}
        trends = {name: load.trend(now_unix_s, ahead_s) for name, load in self._tiers.items()}
        loss = self._loss(sum(load.rate for load in self._tiers.values()))
        now = ahead = variance = lost = 0.0
        owed: list[tuple[float, float]] = []  # (seconds until it is due, work)
        pace_s = LOOSE_S
        for name, load in sorted(self._tiers.items(), key=lambda item: item[1].due_s):
            trend = trends[name]
            if load.whole:
                owed += [(each.due_unix_s - now_unix_s, each.work_s) for each in load.owed]
            else:
                now += trend.now
                ahead += max(trend.now, trend.ahead)
                variance += load.prefill_variance
                lost += loss * load.rate * load.longest_s(prices)
                pace_s = min(pace_s, load.pace_s)
            share = max(1.0 - prices.batch_s / pace_s, BARE)
            horizons = [*owed] if load.whole else [*owed, (load.due_s, 0.0)]
            work, due_s = _most(ahead, variance, lost, horizons)
            needs[name] = Need(work / share, now, ahead, work, due_s, share)
        return needs

    def _serving(self, now_unix_s: float) -> int:
        return sum(
            digest.accepting and now_unix_s - digest.at_unix_s <= STALE_S
            for digest in self._digests.values()
        )


def _most(
    level: float, variance: float, lost: float, horizons: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """The most work a second that is due within one of the horizons, and that horizon. `level`
    comes each second, with this variance of what may not wait; `lost` of it may be.
    """
    most = (0.0, 0.0)
    standing_s = 0.0
    for due_s, work_s in sorted(horizons):
        standing_s += work_s
        horizon_s = max(due_s, 1.0)
        deviation_s = math.sqrt(variance * horizon_s)
        reserve_s = deviation_s * deviations(lost * horizon_s / deviation_s) if deviation_s else 0.0
        most = max(most, (level + (standing_s + reserve_s) / horizon_s, horizon_s))
    return most


def _words(tier: str, need: Need, ahead_s: float) -> str:
    """One sentence that says why."""
    comes = f"{need.now:.2f} s of work come each second"
    if need.ahead > need.now:
        comes += f", {need.ahead:.2f} in {ahead_s:.0f} s"
    return (
        f"{tier} and what is due sooner: {comes}; {need.work:.2f} with a reserve and with what is "
        f"owed, due within {need.due_s:.3g} s; a replica has {need.share:.2f} s a second beside "
        f"passes: {need.replicas:.2f} replicas"
    )
