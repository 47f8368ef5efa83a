"""Starts and drains the replicas of a simulated fleet by a law, and counts what they cost."""

from collections.abc import Callable, Sequence

from loadgen.simulator.elastic.law import Fleet, Law, Scaling
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.virtual_fleet import VirtualFleet
from loadgen.simulator.virtual_replica import VirtualReplica
from shared.schemas import Digest
from shared.vocabulary import Role


class Scaler:
    """A replica costs from the decision to start it until it has left."""

    def __init__(
        self,
        scaling: Scaling,
        timeline: Timeline,
        fleet: VirtualFleet,
        begun: list[VirtualReplica],
        made: Callable[[], VirtualReplica],
    ) -> None:
        """`begun`: the replicas that serve from the start; `made` makes a further one."""
        self._set, self._timeline, self._fleet, self._made = scaling, timeline, fleet, made
        self.law: Law = scaling.law()
        self._serving = list(begun)
        self._starting: list[float] = []  # when each will serve
        self._leaving = 0
        self._changed_s = timeline.now_s
        self.replica_s = 0.0
        self.counts: list[tuple[float, int]] = [(timeline.now_s, len(begun))]
        for replica in begun:
            self.law.announced(replica.announce)
        timeline.after(self.law.every_s, self._look)

    def settle(self) -> None:
        """Count the cost until now."""
        now_s = self._timeline.now_s
        self.replica_s += (now_s - self._changed_s) * (self._count + self._leaving)
        self._changed_s = now_s

    @property
    def _count(self) -> int:
        return len(self._serving) + len(self._starting)

    def _look(self) -> None:
        now_s = self._timeline.now_s
        digests = [replica.digest() for replica in self._serving]
        wanted = self.law.wanted(Fleet(now_s, digests, len(self._starting)))
        for replica in self._serving:
            replica.serve(Role.PREFILL if replica.id in self.law.prefill else Role.BOTH)
        wanted = min(max(wanted, self._set.least), self._set.most)
        if wanted != self._count:
            self.settle()
            while self._count < wanted:
                self._start()
            while self._count > wanted and self._starting:
                self._starting.pop()  # what would serve last
            if self._count > wanted:
                self._leave(self._count - wanted, digests)
            self.counts.append((now_s, self._count))
        self._timeline.after(self.law.every_s, self._look)

    def _start(self) -> None:
        ready_s = self._timeline.now_s + self._set.warm_up_s
        self._starting.append(ready_s)
        self._timeline.at(ready_s, self._serve, ready_s)

    def _serve(self, ready_s: float) -> None:
        if ready_s not in self._starting:
            return  # it was given up meanwhile
        self._starting.remove(ready_s)
        replica = self._made()
        self._serving.append(replica)
        self._fleet.start([replica])
        self.law.announced(replica.announce)

    def _leave(self, n: int, digests: Sequence[Digest]) -> None:
        """The replicas with the fewest requests leave; of equals the newest."""
        held = {d.replica: d.waiting + d.running + d.best_effort for d in digests}
        order = self._serving[::-1]
        order.sort(key=lambda replica: held[replica.id])
        for replica in order[: min(n, len(self._serving) - 1)]:
            self._serving.remove(replica)
            self._leaving += 1
            self._fleet.drain(replica, self._gone)

    def _gone(self) -> None:
        self.settle()
        self._leaving -= 1
