"""The time that control takes in a simulated fleet: none, as the papers assume, or that of the live
services.
"""

from typing import NamedTuple


class Latency(NamedTuple):
    """The control latency of a fleet: seconds, one way unless stated otherwise; and how many plans
    a replica has at once.
    """

    name: str
    depth: int
    lead_s: float  # first guess of how long before the end of an iteration the next plan leaves
    create_s: float  # storing a new record
    change_s: float  # changing one by compare-and-set
    offer_s: float  # admission -> planner
    answer_s: float  # planner -> admission
    hold_s: float  # planner -> worker, the reads of the store included
    held_s: float  # worker -> planner
    plan_s: float  # planner -> worker
    ack_s: float  # end of an iteration -> its ack stored, and with the planner
    over_s: float  # ack stored -> the record says what became of the attempt
    hint_s: float  # admission -> relegation, the read of the store included
    digest_s: float  # planner -> admission and relegation
    digest_every_s: float = 0.1

    @staticmethod
    def none() -> "Latency":
        """Depth 1 and no time between a decision and its effect."""
        return Latency("none", 1, *[0.0] * 12)

    @staticmethod
    def live() -> "Latency":
        """Medians of a live fleet: two replicas at an A100's pace, 6 requests a second, all on one
        machine of two cores, 2026-11-20.

        The sources are spans (admit, place, decide and hold, queue); `at_unix_s` and `ended_unix_s`
        of digests and acks against the instant at which a bystander received them; and timed reads
        and writes of the bucket. The 99th percentiles are three to five times as long; depth and
        lead are the services' own defaults.
        """
        return Latency(
            name="live",
            depth=2,
            lead_s=0.004,
            create_s=0.00135,  # tokenising, two writes, the answer to the client
            change_s=0.0006,  # a read and a write
            offer_s=0.0003,
            answer_s=0.0005,
            hold_s=0.0011,
            held_s=0.0004,
            plan_s=0.0005,  # as a digest travels, less what making one takes
            ack_s=0.0010,
            over_s=0.0020,  # a message, what was made, the record
            hint_s=0.0008,
            digest_s=0.0006,
        )

    @property
    def first_plan_s(self) -> float:
        """The time from a request's arrival to the beginning of its first iteration, on an idle
        replica.
        """
        return self.create_s + self.offer_s + self.hold_s + self.held_s + self.plan_s


LATENCIES = {latency.name: latency for latency in (Latency.none(), Latency.live())}
