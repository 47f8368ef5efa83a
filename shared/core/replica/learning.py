"""Learns from the iterations of a replica: the speed of its engine and of its draft model, and the
lead of its plans. It also hands the policy the observations that the policy learns from.
"""

from collections.abc import Sequence

from shared.core.replica.events import Leapt
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.reconciliation import Landing
from shared.core.replica.request_table import RequestTable
from shared.perf.draft import Draft
from shared.perf.draft_correction import DraftCorrection
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected
from shared.perf.shape import BatchShape
from shared.policy.seam import Drafts, Ended, Observation, Policy
from shared.schemas import PlanAck

IDLE_SHARE = 0.003
STEP_MAX = 0.1  # as a share of an iteration: a longer wait has other causes than the plan's way


class Lead:
    """The time from the next plan's leaving to the predicted end of the running iteration: short
    enough to include the newest requests, long enough for the plan to arrive in time. It grows by
    what the engine waited beyond its share, and shrinks while the engine waits less.

    On average a new request waits as long as the lead; the engine waits as long as a plan comes
    after the end. Where iterations end as predicted, the lead covers only the message's way. Where
    not, a lead that covers the worst of them makes every new request wait an iteration more, and
    the engine rest only a little less. So the engine may wait for IDLE_SHARE of its time.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self.seconds, self._min_s, self._max_s = first_s, first_s, max_s

    def observe(self, idle_s: float, exec_s: float) -> None:
        """The engine waited `idle_s` for a plan of `exec_s` that was sent while another ran."""
        wanted_s = self.seconds + min(idle_s, STEP_MAX * exec_s) - IDLE_SHARE * exec_s
        self.seconds = min(max(wanted_s, self._min_s), self._max_s)


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
        """Learn from an acked iteration, in which these requests ended."""
        drafted_s = ack.drafted_s or flight.draft_s
        computed_s = ack.exec_s - drafted_s - ack.loaded_s
        self.profile.observe(landing.shape, computed_s, ack.late_s)
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
        """Tell the policy of requests that ended while nothing ran."""
        self._policy.observe(Observation(now_unix_s, BatchShape(), 0.0, 0.0, ended))

    def leapt(self, event: Leapt, flight: InFlightPlan, table: RequestTable) -> None:
        """The policy learns from all iterations. The profile learns from the one that is acked,
        and from each in which requests drafted.
        """
        predicted_s = flight.predicted_s
        if not event.drafted:
            n, ended_unix_s, exec_s = event.iterations, event.ended_unix_s, event.exec_s
            self._policy.observe(
                Observation(ended_unix_s, flight.shape, predicted_s, exec_s / n, iterations=n)
            )
            return
        rows = table.row_of[flight.slots]
        tbt_s, application = table.tbt_s[rows], table.application[rows]
        for ended_unix_s, exec_s, drafted_s, shape, drafted, made in event.drafted:
            self.profile.observe(shape, exec_s - drafted_s)
            some, drafts = drafted.nonzero()[0], None
            if len(some):
                drafts = Drafts(tbt_s[some], application[some], drafted[some], made[some] - 1)
            seen = Observation(ended_unix_s, shape, predicted_s, exec_s, drafts=drafts)
            self._policy.observe(seen)

    def decodes_s(self, shape: BatchShape) -> float:
        """The seconds that a mixed batch's decodes take by themselves; 0 for any other batch."""
        if not shape.prefills or not shape.decodes:
            return 0.0
        return self.profile.batch_s(
            BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)
        )
