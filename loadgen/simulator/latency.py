"""The time that control takes in a simulated fleet: none, as the papers assume, or as long as in
the live services.

Each step that takes time draws it from a seeded law. Messages of one sender to one receiver never
overtake each other (Route), as on NATS.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from loadgen.simulator.timeline import Timeline

P99_SIGMAS = 2.3263478740408408  # the 99th percentile of a normal law, in standard deviations
DIGEST_EVERY_S = 0.1  # as planners publish them


class Hop(NamedTuple):
    """One step of control. Its seconds are lognormal: `p99_x` is their 99th percentile over their
    median. At a `p99_x` of 1 each takes the median, and nothing is drawn.
    """

    median_s: float
    p99_x: float

    def draw_s(self, rng: Random) -> float:
        if self.p99_x == 1.0:
            return self.median_s
        return self.median_s * math.exp(rng.gauss(0.0, math.log(self.p99_x) / P99_SIGMAS))


class Latency(NamedTuple):
    """A fleet's control latency, one way unless stated otherwise, and a replica's plan depth."""

    name: str
    depth: int
    lead_s: float  # first guess of how long before the end of an iteration the next plan leaves
    create: Hop  # a request comes -> its first offer leaves
    change: Hop  # changing one by compare-and-set
    offer: Hop  # admission -> planner
    answer: Hop  # planner -> admission
    hold: Hop  # planner -> worker, the reads of the store included
    held: Hop  # worker -> planner
    plan: Hop  # planner -> worker
    ack: Hop  # end of an iteration -> its ack stored, and with the planner
    over: Hop  # ack stored -> the record says what became of the attempt
    hint: Hop  # admission -> relegation, the read of the store included
    digest: Hop  # planner -> admission and relegation
    digest_every_s: float = DIGEST_EVERY_S

    @staticmethod
    def none() -> "Latency":
        """Depth 1 and no time between a decision and its effect."""
        hops = [Hop(0.0, 1.0)] * 11
        return Latency._make(("none", 1, 0.0, *hops, DIGEST_EVERY_S))

    @staticmethod
    def live() -> "Latency":
        """A live fleet's: two replicas at an A100's pace, qoserve, 6 and 19 requests a second, all
        on one machine of two cores.

        The sources are spans (admit, place, decide and hold, queue); `at_unix_s` and `ended_unix_s`
        of digests and acks against the instant at which a bystander received them; and timed reads
        and writes of the bucket. Depth and lead are the services' own defaults.
        """
        return Latency(
            name="live",
            depth=2,
            lead_s=0.004,
            create=Hop(0.0006, 2.5),
            change=Hop(0.00095, 4.0),  # a read and a write
            offer=Hop(0.00055, 3.3),
            answer=Hop(0.0005, 2.8),
            hold=Hop(0.0015, 3.0),
            held=Hop(0.00045, 2.8),
            plan=Hop(0.0005, 4.0),  # as a digest travels, less what making one takes
            ack=Hop(0.0018, 3.0),
            over=Hop(0.0015, 2.1),  # a message, what was made, the record
            hint=Hop(0.0011, 4.0),
            digest=Hop(0.0006, 4.0),
        )

    def at_medians(self) -> "Latency":
        """This latency, with each step at its median."""
        return Latency._make(
            field._replace(p99_x=1.0) if isinstance(field, Hop) else field for field in self
        )

    @property
    def first_plan_s(self) -> float:
        """The time from a request's arrival to the beginning of its first iteration, on an idle
        replica, with each step at its median.
        """
        hops = (self.create, self.offer, self.hold, self.held, self.plan)
        return sum(hop.median_s for hop in hops)


class Route:
    """The way of messages from one sender to one receiver: each takes a time of its own, but none
    overtakes one sent before it.
    """

    def __init__(self, timeline: Timeline, hop: Hop, rng: Random) -> None:
        self._timeline, self._hop, self._rng = timeline, hop, rng
        self._last_s = -math.inf

    def send(self, receive: Callable[..., None], *args: Any) -> float:
        """Returns the instant at which the message is received."""
        self._last_s = max(self._last_s, self._timeline.now_s + self._hop.draw_s(self._rng))
        self._timeline.at(self._last_s, receive, *args)
        return self._last_s


LATENCIES = {latency.name: latency for latency in (Latency.none(), Latency.live())}
