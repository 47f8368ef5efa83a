"""Learning from the iterations of a replica: the speed of its engine and of its draft model, the
lead of its plans, and all that the policy learns.
"""

from collections.abc import Sequence

from shared.core.replica.events import Leapt
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.lead import Lead
from shared.core.replica.reconciliation import Landing
from shared.perf.draft import Draft
from shared.perf.draft_correction import DraftCorrection
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected
from shared.perf.shape import BatchShape
from shared.policy.seam import Ended, Observation, Policy
from shared.schemas import PlanAck


class Learning:
    def __init__(self, policy: Policy, profile: Profile, draft: Draft | None, lead: Lead) -> None:
        self.profile, self.draft, self.lead = Corrected(profile), DraftCorrection(draft), lead
        self._policy = policy

    def ran(
        self,
        ack: PlanAck,
        flight: InFlightPlan,
        landing: Landing,
        ended: Sequence[Ended],
        now_unix_s: float,
    ) -> None:
        """An iteration is acked, in which these requests ended."""
        drafted_s = ack.drafted_s or flight.draft_s
        self.profile.observe(landing.shape, ack.exec_s - drafted_s, ack.late_s)
        if not flight.draft_begins:
            self.draft.observe(flight.draft_s, ack.drafted_s)
        if flight.follows:
            self.lead.observe(ack.idle_s, ack.exec_s)
        seen = Observation(
            now_unix_s,
            landing.shape,
            flight.predicted_s,
            ack.exec_s,
            ended,
            landing.drafts,
            late_s=ack.late_s,
        )
        self._policy.observe(seen)

    def ended(self, ended: Sequence[Ended], now_unix_s: float) -> None:
        """These requests ended, and nothing ran."""
        self._policy.observe(Observation(now_unix_s, BatchShape(), 0.0, 0.0, ended))

    def leapt(self, event: Leapt, flight: InFlightPlan) -> None:
        """The policy learns from all iterations, the profile from the one that is acked."""
        n, predicted_s = event.iterations, flight.predicted_s
        seen = Observation(
            event.ended_unix_s, flight.shape, predicted_s, event.exec_s / n, iterations=n
        )
        self._policy.observe(seen)

    def decodes_s(self, shape: BatchShape) -> float:
        """The seconds of a mixed batch's decodes alone; 0 for any other batch."""
        if not shape.prefills or not shape.decodes:
            return 0.0
        return self.profile.batch_s(
            BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)
        )
