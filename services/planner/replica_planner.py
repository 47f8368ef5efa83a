"""Plans for one replica, under a lease: carries messages between the bus and the replica's core,
the object that makes the decisions.
"""

import asyncio
from collections import deque
from typing import assert_never

import structlog
from msgspec.structs import replace

from services.planner.config import PlannerConfig
from services.planner.metrics import PlannerMetrics, Watch
from services.planner.resync_check import misreported
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.columns import unpack_list
from shared.core.announced import draft_of, profile_of
from shared.core.replica.events import (
    Acked,
    Answer,
    Heartbeat,
    HoldDone,
    NeedResync,
    Offered,
    Refused,
    ReplicaAction,
    ReplicaEvent,
    ReplicaSettings,
    SendHold,
    SendPlan,
    Synced,
    WorkerGone,
)
from shared.core.replica.replica import ReplicaCore
from shared.errors import BusError, NoResponders, PeerError
from shared.policy import registry
from shared.process.chores import Chores
from shared.process.drive import Inbox, drive
from shared.request_timeline import Neighbour
from shared.schemas import (
    Announce,
    AskPrefixes,
    BatchPlan,
    Hold,
    HoldAnswer,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    PlanAck,
    PlanRefused,
    Resync,
    ResyncEntry,
    ResyncPage,
    Roster,
    RosterAnswer,
)
from shared.store.leases import Lease
from shared.telemetry import conventions as names
from shared.telemetry.telemetry import TRACEPARENT, AttributeValue, Tracing
from shared.vocabulary import ReplicaId, RequestKey, Role

log = structlog.get_logger()

# Two seconds of offers at 1000/s, of acks at two for each of 20 iterations a second, and of
# heartbeats, rounded up. A full inbox declines offers and loses acks, refusals and heartbeats: the
# next ack or heartbeat, or an overdue plan, shows the loss, and the replica planner resyncs.
INBOX_LIMIT = 4096
RESYNC_TIMEOUT_S = 2.0  # longer than an iteration: the worker answers between two
RESYNC_PAUSE_S = 0.1
LOADS_S = 0.02
PLAN_TRACE_S = 0.25


class StaleEpoch(Exception):
    """This replica planner has no lease any more: another has a higher epoch, or it lapsed."""


class ReplicaPlanner:
    """Plans for one replica until stopped."""

    def __init__(
        self,
        cfg: PlannerConfig,
        planner: str,
        bus: Bus,
        clock: Clock,
        lease: Lease,
        announce: Announce,
        tracing: Tracing,
        metrics: PlannerMetrics,
    ) -> None:
        """Raises ConfigError where the announced profile does not exist."""
        self._cfg, self._planner, self.lease = cfg, planner, lease
        self._bus, self._clock, self._tracing = bus, clock, tracing
        self.replica: ReplicaId = announce.replica
        self.epoch = max(lease.epoch, announce.epoch + 1)
        self.heard_unix_s = clock.unix_s()
        self._incarnation = announce.incarnation
        settings = ReplicaSettings(depth=cfg.depth, lead_s=cfg.lead_s, hand_back=cfg.hand_back)
        policy = registry.make(cfg.policy, cfg.settings)
        self._served = _served(announce)
        self.core = ReplicaCore(
            policy,
            profile_of(announce),
            epoch=self.epoch,
            settings=settings,
            draft=draft_of(announce),
        )
        self._watch = Watch(metrics, self.replica, self.core)
        self._inbox: Inbox[ReplicaEvent] = Inbox(INBOX_LIMIT, _joined)
        self._waiting: dict[tuple[RequestKey, int], list[tuple[Call, float]]] = {}
        self._chores = Chores()
        self._resyncing = False
        self._sync = 0
        self._step_s = self._traced_unix_s = 0.0
        self._loads_unix_s, self._known_loads = 0.0, tuple[Neighbour, ...]()

    async def run(self) -> None:
        """Plan until cancelled. Raises StaleEpoch."""
        stale: list[BaseException] = []
        replica, bus = self.replica, self._bus
        try:
            async with self._chores as chores:
                chores.listen(await bus.subscribe(subjects.acked(replica), PlanAck, self._on_acked))
                chores.listen(
                    await bus.subscribe(
                        subjects.plan_refused(replica), PlanRefused, self._on_refused
                    )
                )
                self._need_resync("begin")
                endpoints = [
                    Endpoint("offer", subjects.offer(replica), Offer, self._on_offer, "seat"),
                    Endpoint("roster", subjects.roster(replica), Roster, self._on_roster, "seat"),
                    Endpoint(
                        "prefixes",
                        subjects.prefixes(replica),
                        AskPrefixes,
                        self._on_prefixes,
                        "seat",
                    ),
                ]
                metadata = {
                    "replica": replica,
                    "planner": self._planner,
                    "policy": self._cfg.policy,
                    "epoch": str(self.epoch),
                }
                chores.listen(await bus.serve("seat", endpoints, metadata))
                log.info("seat.taken", replica=replica, epoch=self.epoch, policy=self._cfg.policy)
                chores.start(self._digest_loop(), name="planner.digest")
                await drive(
                    self.core,
                    self._inbox,
                    self._perform,
                    self._clock,
                    name=f"planner.{replica}",
                    on_step=self._stepped,
                )
        except* StaleEpoch as group:
            stale.extend(group.exceptions)
        finally:
            self._watch.leave()
        if stale:
            raise StaleEpoch(str(stale[0]))

    def heard(self, announce: Announce, receivers: int, role: Role) -> None:
        """The worker announced itself, so it lives. A new incarnation holds nothing. `receivers`,
        `role`: as in Heartbeat.
        """
        self.heard_unix_s = self._clock.unix_s()
        # the worker was started again and has measured its profile anew
        if _served(announce) != self._served:
            self._inbox.fail(StaleEpoch(f"{self.replica} announces another model or profile"))
        elif announce.incarnation != self._incarnation:
            self._incarnation = announce.incarnation
            self._inbox.put(Refused("another incarnation"))  # once for each incarnation
        else:
            self._inbox.offer(Heartbeat(announce, receivers, role))

    # ------------------------------------------------------------ the core's actions

    async def _perform(self, action: ReplicaAction) -> None:
        match action:
            case SendPlan(plan):
                self._watch.sent(plan.seq, self._clock.unix_s())
                try:
                    await self._bus.publish(
                        subjects.plan(self.replica), plan, headers=self._traced(plan)
                    )
                except BusError as error:  # its ack will be missed
                    log.warning("plan.lost", replica=self.replica, seq=plan.seq, error=str(error))
            case SendHold(hold):
                self._chores.spawn(self._hold(hold), "planner.hold")
            case Answer(key, attempt, answer):
                if isinstance(answer, OfferDeclined):
                    answer = replace(answer, loads=self._loads())
                for call, came_unix_s in self._waiting.pop((key, attempt), []):
                    self._chores.spawn(call.reply(answer), "planner.answer")
                    self._trace(call, came_unix_s, attempt, answer)
            case NeedResync(reason):
                self._need_resync(reason)
            case _:
                assert_never(action)

    def _traced(self, plan: BatchPlan) -> dict[str, str] | None:
        """The trace of this plan, which its iteration joins; a plan in PLAN_TRACE_S has one."""
        now = self._clock.unix_s()
        if now - self._traced_unix_s < PLAN_TRACE_S or not plan.slots:
            return None
        self._traced_unix_s = now
        attributes: dict[str, AttributeValue] = {
            names.REPLICA: self.replica,
            names.PLAN_SEQ: plan.seq,
            names.BATCH: len(plan.slots) // 4,
            names.PREDICTED: plan.predicted_s,
            "slackline.planner": self._planner,
            "slackline.policy": self._cfg.policy,
        }
        span = self._tracing.start("plan", None, attributes, at_unix_s=now - self._step_s)
        span.end(now)
        return {TRACEPARENT: span.traceparent} if span.traceparent else None

    def _stepped(self, seconds: float) -> None:
        self._step_s = seconds
        self._watch.step(seconds)

    def _loads(self) -> tuple[Neighbour, ...]:
        """The prefills that come first, LOADS_S old at most: declines may come by the hundred."""
        now = self._clock.unix_s()
        if now - self._loads_unix_s > LOADS_S:
            self._loads_unix_s, self._known_loads = now, self.core.loads()
        return self._known_loads

    def _trace(self, call: Call, came_unix_s: float, attempt: int, answer: OfferAnswer) -> None:
        traceparent = call.headers.get(TRACEPARENT, "")
        if traceparent:
            attributes: dict[str, AttributeValue] = {
                names.REPLICA: self.replica,
                names.ATTEMPT: attempt,
                "slackline.planner": self._planner,
                "slackline.policy": self._cfg.policy,
                "slackline.accepted": isinstance(answer, OfferAccepted),
                "slackline.reason": answer.reason,
            }
            self._tracing.record(
                "decide and hold", traceparent, came_unix_s, self._clock.unix_s(), attributes
            )

    # ------------------------------------------------------------ messages

    def _on_offer(self, offer: Offer, call: Call) -> None:
        calls = self._waiting.setdefault((offer.key, offer.attempt), [])
        calls.append((call, self._clock.unix_s()))
        if not self._inbox.offer(Offered([offer])):
            calls.pop()
            if not calls:
                del self._waiting[offer.key, offer.attempt]
            self._chores.spawn(
                call.reply(OfferDeclined(reason="the planner is overloaded")), "planner.answer"
            )

    def _on_acked(self, ack: PlanAck, call: Call) -> None:
        if ack.epoch == self.epoch:
            self._watch.acked(ack, self._clock.unix_s())
        self._inbox.offer(Acked(ack))

    def _on_roster(self, asked: Roster, call: Call) -> None:
        answer = RosterAnswer(entries=self.core.roster(unpack_list(asked.slots)))
        self._chores.spawn(call.reply(answer), "planner.roster")

    def _on_prefixes(self, _ask: AskPrefixes, call: Call) -> None:
        self._chores.spawn(call.reply(self.core.kept.all()), "planner.prefixes")

    def _on_refused(self, refused: PlanRefused, call: Call) -> None:
        if refused.epoch > self.epoch:
            self._inbox.fail(StaleEpoch(f"epoch {refused.epoch} was seen on {self.replica}"))
        elif refused.epoch == self.epoch:
            self._inbox.offer(Refused(refused.reason))

    async def _hold(self, hold: Hold) -> None:
        try:
            answer: HoldAnswer | WorkerGone = await self._bus.request(
                subjects.hold(self.replica),
                hold,
                HoldAnswer,
                timeout_s=self._cfg.hold_timeout_s + hold.fetch_s,
            )
        except NoResponders:
            answer = WorkerGone()
        except (BusError, PeerError) as error:
            answer = OfferInDoubt(reason=str(error))
        self._inbox.put(HoldDone(hold.slot, answer))

    def _need_resync(self, reason: str) -> None:
        if not self._resyncing:
            self._resyncing = True
            log.info("seat.resync", replica=self.replica, epoch=self.epoch, reason=reason)
            self._chores.spawn(self._resync(), "planner.resync")

    async def _resync(self) -> None:
        """Ask until the worker has reported everything it holds."""
        while True:
            self._sync += 1
            entries: list[ResyncEntry] = []
            try:
                more, page = True, None
                while more:
                    ask = Resync(
                        epoch=self.epoch, sync=self._sync, page=0 if page is None else page + 1
                    )
                    answer = await self._bus.request(
                        subjects.resync(self.replica), ask, ResyncPage, timeout_s=RESYNC_TIMEOUT_S
                    )
                    entries += answer.entries
                    if len(entries) > answer.announce.max_slots:
                        raise PeerError(f"{self.replica} reports more requests than it has slots")
                    more, page = answer.more, ask.page
                if reason := misreported(answer.announce, entries):
                    raise PeerError(f"{self.replica} reports {reason}")
                self._incarnation = answer.announce.incarnation
                synced = Synced(
                    answer.announce,
                    self._sync,
                    answer.next_seq,
                    answer.ack_seq,
                    entries,
                    answer.shared_blocks,
                    answer.draft_shared_blocks,
                    answer.kept,
                    answer.moved,
                )
                self._resyncing = False
                self._inbox.put(synced)
                return
            except PeerError as error:
                if error.code in ("stale_epoch", "no_lease"):
                    self._inbox.fail(StaleEpoch(str(error)))
                    return
                log.warning("resync.refused", replica=self.replica, reason=str(error))
            except BusError:
                pass
            await asyncio.sleep(RESYNC_PAUSE_S)

    async def _digest_loop(self) -> None:
        while True:
            self._watch.show(self._clock.unix_s())
            digest = self.core.digest(planner=self._planner, now_unix_s=self._clock.unix_s())
            if digest is not None:
                try:
                    await self._bus.publish(subjects.digest(self.replica), digest)
                except BusError as error:
                    log.warning("digest.lost", replica=self.replica, error=str(error))
            await asyncio.sleep(self._cfg.digest_s)


def _joined(first: ReplicaEvent, rest: deque[ReplicaEvent]) -> ReplicaEvent:
    """Join offers in a row, which are decided together. An ack between two keeps its place."""
    if not isinstance(first, Offered) or not rest or not isinstance(rest[0], Offered):
        return first
    offers = list(first.offers)
    while rest and isinstance(following := rest[0], Offered):
        offers += following.offers
        rest.popleft()
    return Offered(offers)


def _served(announce: Announce) -> tuple[object, ...]:
    """The facts of a worker that stay as long as one planner plans for it."""
    return announce.model, announce.profile, announce.fitted, announce.draft, announce.kv_load_s
