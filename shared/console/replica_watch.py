"""Keeps what the console knows of one replica, from the digests, plans and acks that it hears."""

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice

from shared.console.life import Life
from shared.console.picture import Iteration, ReplicaPicture
from shared.console.slack import classes
from shared.schemas import Announce, BatchPlan, Digest
from shared.vocabulary import ReplicaId

ITERATIONS = 240  # kept for the page's strip: the widest screen shows fewer
PLANS = 16  # kept until their acks come; a worker has two
SLOTS_LIMIT = 4096  # requests of one replica; more are not followed
RATE_S = 5.0  # the longest span over which rates are counted
ASK_S, ASK_ALL_S = 0.15, 10.0  # between two questions for unknown slots; for all, as acks get lost


class ReplicaWatch:
    """All that is known of one replica."""

    def __init__(self, name: ReplicaId) -> None:
        self.name = name
        self.digest: Digest | None = None
        self.announce: Announce | None = None
        self.digest_unix_s = -math.inf
        # from its first digest, or from the beginning of its first iteration
        self._watched_unix_s = math.inf
        self.incarnation = ""
        self.ack_seq = 0
        self.by_slot: dict[int, Life] = {}
        self.unknown: set[int] = set()
        self.iterations: deque[Iteration] = deque(maxlen=ITERATIONS)
        self._made: deque[tuple[float, int, float]] = deque(maxlen=ITERATIONS)
        self._plans: dict[tuple[int, int], float] = {}
        self.asked_unix_s = self.asked_all_unix_s = -math.inf

    def begin(self, incarnation: str) -> None:
        """A new incarnation of the worker holds no request of the one before."""
        self.incarnation, self.ack_seq = incarnation, 0
        self.by_slot.clear()
        self.unknown.clear()
        self._plans.clear()

    def report(self, digest: Digest, now_unix_s: float) -> None:
        self.digest, self.digest_unix_s = digest, now_unix_s
        self._watched_unix_s = min(self._watched_unix_s, now_unix_s)

    def planned(self, plan: BatchPlan) -> None:
        self._plans[plan.epoch, plan.seq] = plan.predicted_s
        while len(self._plans) > PLANS:
            del self._plans[next(iter(self._plans))]

    def predicted_s(self, epoch: int, seq: int) -> float:
        return self._plans.pop((epoch, seq), 0.0)

    def ran(self, iteration: Iteration, emitted: int, now_unix_s: float) -> None:
        self.iterations.append(iteration)
        self._made.append((now_unix_s, emitted, iteration.exec_s))
        self._watched_unix_s = min(self._watched_unix_s, now_unix_s - iteration.exec_s)

    def question(self, now_unix_s: float) -> list[int] | None:
        """The slots to ask its planner about, [] for all; None: nothing is to be asked now."""
        if now_unix_s - self.asked_all_unix_s >= ASK_ALL_S:
            self.asked_unix_s = self.asked_all_unix_s = now_unix_s
            return []
        if self.unknown and now_unix_s - self.asked_unix_s >= ASK_S:
            self.asked_unix_s = now_unix_s
            return sorted(self.unknown)
        return None

    def picture(self, now_unix_s: float, since: int) -> ReplicaPicture | None:
        """The picture of the replica; None before its first digest."""
        digest, announce = self.digest, self.announce
        if digest is None:
            return None
        tokens_s, busy = self._rates(now_unix_s)
        return ReplicaPicture(
            name=self.name,
            model=digest.model,
            pool=digest.pool,
            engine=announce.engine if announce else "",
            profile=announce.profile if announce else "",
            planner=digest.planner,
            role=digest.role,
            accepting=digest.accepting,
            heard_s=now_unix_s - self.digest_unix_s,
            kv_blocks=digest.kv_blocks,
            kv_free_blocks=digest.kv_free_blocks,
            waiting=digest.waiting,
            running=digest.running,
            best_effort=digest.best_effort,
            backlog_s=digest.backlog_s,
            tokens_s=tokens_s,
            busy=busy,
            slack=classes(
                life.slack_s(now_unix_s) for life in self.by_slot.values() if _owed(life)
            ),
            iterations=list(_newer(self.iterations, since)),
        )

    def _rates(self, now_unix_s: float) -> tuple[float, float]:
        """Tokens a second, and the part of the time in which the engine computed, over the last
        RATE_S; over less if it was watched for less, or if the kept iterations go less far back.
        """
        since_unix_s = max(self._watched_unix_s, now_unix_s - RATE_S)
        if len(self._made) == ITERATIONS:
            at_unix_s, _, took_s = self._made[0]
            since_unix_s = max(since_unix_s, at_unix_s - took_s)
        emitted, exec_s = 0, 0.0
        for at_unix_s, tokens, took_s in reversed(self._made):
            if at_unix_s < since_unix_s:
                break
            emitted, exec_s = emitted + tokens, exec_s + took_s
        span_s = now_unix_s - since_unix_s
        return (emitted / span_s, min(exec_s / span_s, 1.0)) if span_s > 0 else (0.0, 0.0)


def _owed(life: Life) -> bool:
    return life.slo is not None and not life.best_effort


def _newer(iterations: deque[Iteration], since: int) -> Iterable[Iteration]:
    """The iterations after `since`, oldest first."""
    count = 0
    for iteration in reversed(iterations):
        if iteration.n <= since:
            break
        count += 1
    return islice(iterations, len(iterations) - count, None)
