"""How long control takes in a simulated fleet: nothing, as the papers assume, or what the live services need."""

from typing import NamedTuple


class Latency(NamedTuple):
    """Seconds, one way where nothing else is said; and how many plans a replica has at once."""

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
        return Latency(1, *[0.0] * 12)

    @staticmethod
    def live() -> "Latency":
        """What a fleet on one machine was measured to need, 2 cores, JetStream on its disk."""
        return Latency(
            depth=2,
            lead_s=0.004,
            create_s=0.0010,
            change_s=0.0005,
            offer_s=0.0005,
            answer_s=0.0005,
            hold_s=0.0007,
            held_s=0.0003,
            plan_s=0.0005,
            ack_s=0.0007,
            over_s=0.0005,
            hint_s=0.0007,
            digest_s=0.0005,
        )

    @property
    def first_plan_s(self) -> float:
        """Arrival to the beginning of its first iteration, on an idle replica."""
        return self.create_s + self.offer_s + self.hold_s + self.held_s + self.plan_s
