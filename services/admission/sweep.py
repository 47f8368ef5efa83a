"""The sweep reads every open record, and repairs what a death, a lost message or a restarted broker
left behind: all recovery is here. A sweep runs every `sweep_s`: the instances that live take turns.
Each also sweeps soon after events that may strand requests. Each step is a compare-and-set, so any
number may sweep at once.
"""

import asyncio
from collections.abc import Callable, Container, Sequence

import structlog

from services.admission.config import AdmissionConfig
from services.admission.deletions import Deletions
from services.admission.workers import Workers
from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.admission.admission import AdmissionCore, AdmissionEvent, Opened
from shared.core.admission.admission import Lost as ReplicaLost
from shared.core.record import record as life
from shared.errors import BusError, BusTimeout, PeerError, WrongSequence
from shared.placing.ending import Ending
from shared.placing.place import Placer
from shared.schemas import Fenced, Hint, Holdings, HoldingsAnswer, LogEntry, Record
from shared.store.acklog import Story, decode_log, encode_entry, fold_in_turns
from shared.store.leases import holders
from shared.store.outputs import ENDED_TTL_S
from shared.store.presence import Absences
from shared.store.records import Records, Stored
from shared.subjects import ack_log
from shared.vocabulary import RecordState, ReplicaId, RequestKey

log = structlog.get_logger()

LOOK_S = 0.25  # how often lost workers are looked for, and how soon a sweep asked for begins
STALLED_S = 1.0  # a turn of the loop that comes this late has received no heartbeats either
SPACING_S = 1.0  # least time between two sweeps
# An instance takes its turn at least this often. Its listings must not be so far apart that records
# which ended may have expired (services/admission/deletions.py).
TURN_S = ENDED_TTL_S / 3
# A body without a record is deleted after this. To store the record takes 10 s at most; the
# marker of a deleted body has gone by then.
ORPHAN_S = 20.0


class Sweep:
    """The sweep of one admission instance."""

    def __init__(
        self,
        cfg: AdmissionConfig,
        bus: Bus,
        clock: Clock,
        owner: str,
        records: Records,
        placer: Placer,
        workers: Workers,
        absences: Absences,
        core: AdmissionCore,
        ending: Ending,
        feed: Callable[[AdmissionEvent], None],
    ) -> None:
        self._cfg, self._bus, self._clock, self._owner = cfg, bus, clock, owner
        self._records, self._placer, self._workers, self._core = records, placer, workers, core
        self._absences = absences
        self._ending, self._feed = ending, feed
        self.swept_unix_s = 0.0  # when the last whole sweep ended
        self._soon = True  # a former instance may have left something
        # attempts that their worker did not know at the last sweep
        self._unknown: set[tuple[RequestKey, int]] = set()
        self._live_owners: set[str] = set()
        self._orphans: dict[str, float] = {}  # what no record names: seen first, unix time
        # from then on outputs are looked through for a while: an instance may have left some
        self._left_unix_s = clock.unix_s()
        self._deletions = Deletions(bus, clock, records, placer, workers, ending, self._fenced_log)

    def opened(self, record: Record) -> None:
        """Note that a record was stored."""
        self._deletions.opened(record)

    @property
    def admissions(self) -> int:
        """The number of admissions that live, as far as is known."""
        return max(len(self._live_owners), 1)

    def missed(self, key: RequestKey) -> None:
        """A client asks for a request that has no record: was it deleted?"""
        self._soon |= key in self._deletions

    def soon(self) -> None:
        self._soon = True

    async def run(self) -> None:
        """Look for the lost, and sweep, until cancelled. A sweep that waits holds up no look."""
        last_turn, begun = -1, 0.0
        turned = self._clock.unix_s()
        sweeping: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._clock.unix_s() - turned > STALLED_S:
                    self._workers.forget()  # it was this process that received nothing
                turned = self._clock.unix_s()
                if await self._look() and (sweeping is None or sweeping.done()):
                    now = self._clock.unix_s()
                    turn = int(now // self._cfg.sweep_s)
                    if (turn != last_turn and self._has(turn)) or (
                        self._soon and now >= begun + SPACING_S
                    ):
                        self._soon = False
                        last_turn, begun = turn, now
                        sweeping = tasks.create_task(self._sweep_once(), name="admission.sweep")
                await asyncio.sleep(LOOK_S)

    @property
    def _turns(self) -> int:
        """The number of sweeps of which one is ours."""
        return max(1, min(self.admissions, int(TURN_S / self._cfg.sweep_s)))

    def _has(self, turn: int) -> bool:
        """Tells whether this sweep is ours. All instances count turns by the fleet's time, and
        agree as soon as they have seen who lives.
        """
        place = sorted(self._live_owners | {self._owner}).index(self._owner)
        return turn % self._turns == place % self._turns

    async def _look(self) -> bool:
        """Look for lost workers and admissions. False: the store does not say which live."""
        self._workers.lose(await self._gone(self._workers.late()))
        for replica in self._workers.newly_lost():
            log.warning("worker.lost", replica=replica)
            self._feed(ReplicaLost(replica))
            self._soon = True
        try:
            named = set((await holders(self._bus.leases, "admission.")).values())
        except (BusError, PeerError) as error:
            self._unreachable(error)
            return False
        owners = named - await self._gone(sorted(named - {self._owner}))
        if self._live_owners - owners:
            self._soon = True
            self._left_unix_s = self._clock.unix_s()
        self._live_owners = owners
        return True

    async def _sweep_once(self) -> None:
        try:
            await self._sweep()
            self.swept_unix_s = self._clock.unix_s()
        except (BusError, PeerError) as error:
            self._unreachable(error)

    def _unreachable(self, error: Exception) -> None:
        """Forget heartbeats: while the store cannot be listed, they may not come either."""
        log.warning("sweep.broken", error=str(error))
        self._workers.forget()
        self._soon = True

    async def _sweep(self) -> None:
        verify: dict[ReplicaId, list[Stored]] = {}
        stranded: dict[tuple[ReplicaId, str], list[Stored]] = {}
        doubted: dict[tuple[ReplicaId, str], list[Stored]] = {}  # it may live
        await self._records.tidy()
        # before the records: each is older than the record that names it
        bodies, outputs = await self._bodies_and_outputs()
        listing = await self._records.listing(whole=bool(outputs))
        named = {stored.record.body_key for stored in listing.open} | listing.outputs
        await self._delete_orphans(bodies, outputs, named)
        if not await self._deletions.end(listing):
            self._soon = True
        for stored in listing.open:
            record = stored.record
            if record.cancelled and record.replica is None:
                await self._end(record.key, lambda r: life.closed(r, self._clock.unix_s()))
                continue
            if record.state == RecordState.RELEGATED:
                await self._fit(record)
                continue
            if self._core.has(record.key):
                continue
            if record.replica is None:
                if record.owner == self._owner or record.owner not in self._live_owners:
                    # its owner is gone, or it is ours and was lost sight of
                    await self._move(stored)
                continue
            lives = self._workers.lives(record.replica, record.incarnation)
            if lives:
                verify.setdefault(record.replica, []).append(stored)
            else:
                found = stranded if lives is False else doubted
                found.setdefault((record.replica, record.incarnation), []).append(stored)
        gone = await self._gone(sorted({incarnation for _, incarnation in doubted}))
        for (replica, incarnation), records in (*stranded.items(), *doubted.items()):
            if (replica, incarnation) not in stranded and incarnation not in gone:
                self._soon = True
                continue
            try:
                await self._recover(replica, incarnation, records)
            except (BusError, PeerError) as error:  # no reason not to recover the others
                log.warning("replica.unrecovered", replica=replica, error=str(error))
                self._soon = True
        unknown: set[tuple[RequestKey, int]] = set()
        for replica, records in verify.items():
            unknown |= await self._verify(replica, records)
        self._unknown = unknown

    @property
    def _outputs_for_s(self) -> float:
        """Two sweeps that are ORPHAN_S apart begin within this time."""
        return ORPHAN_S + 2 * self._turns * self._cfg.sweep_s

    async def _bodies_and_outputs(self) -> tuple[Sequence[str], Sequence[str]]:
        """The keys of all bodies; and, after a death, of all outputs."""
        try:
            recent = self._clock.unix_s() <= self._left_unix_s + self._outputs_for_s
            return await self._records.bodies(), await self._records.outputs() if recent else ()
        except BusError as error:  # no reason not to repair the records
            log.warning("bodies.unreachable", error=str(error))
            return (), ()

    async def _delete_orphans(
        self, bodies: Sequence[str], outputs: Sequence[str], named: Container[str]
    ) -> None:
        """Delete bodies and outputs that no record has named for ORPHAN_S, as after a crash."""
        now, of_bodies = self._clock.unix_s(), set(bodies)
        self._orphans = {
            key: self._orphans.get(key, now) for key in (*bodies, *outputs) if key not in named
        }
        for key, since in self._orphans.items():
            if now - since >= ORPHAN_S:
                log.info("store.orphaned", key=key)
                if key in of_bodies:
                    await self._records.forget_body(key)
                else:
                    await self._records.forget_output(key)

    async def _gone(self, names: Sequence[str]) -> set[str]:
        """The names, of those given, that no process serves any more."""
        gone = await asyncio.gather(*(self._absences.gone(name) for name in names))
        return {name for name, is_gone in zip(names, gone, strict=True) if is_gone}

    async def _fit(self, record: Record) -> None:
        """Cut a request of the pool to the longest context of its model's living workers, or end
        it: it fits nowhere, or its model has left.
        """
        if record.model and self._workers.has_left(record.model):
            await self._end(record.key, lambda seen: life.unserved(seen, self._clock.unix_s()))
            return
        complete = self._workers.complete
        worker = self._workers.any(record.model, record.needs) if complete else None
        if worker is None or record.prompt_tokens + record.max_tokens <= worker.context_tokens:
            return
        context_tokens = worker.context_tokens
        await self._end(
            record.key, lambda seen: life.fitted(seen, context_tokens, self._clock.unix_s())
        )

    # ------------------------------------------------------------ workers that live

    async def _verify(
        self, replica: ReplicaId, records: Sequence[Stored]
    ) -> set[tuple[RequestKey, int]]:
        """Ask the worker about attempts placed there. One unknown at two sweeps is withdrawn."""
        asked = [(s.record.key, s.record.attempt) for s in records]
        try:
            answer = await self._bus.request(
                subjects.holdings(replica), Holdings(asked=asked), HoldingsAnswer, timeout_s=2.0
            )
        except (BusError, PeerError):
            return set()
        if len(answer.known) != len(asked):
            return set()
        unknown: set[tuple[RequestKey, int]] = set()
        unwanted: list[Stored] = []
        for stored, known in zip(records, answer.known, strict=True):
            record = stored.record
            name = (record.key, record.attempt)
            if answer.incarnation != record.incarnation:
                continue
            if not known:
                unknown.add(name)
                self._soon = True
            # known and cancelled: the cancel itself was lost on its way
            if (known and record.cancelled) or (not known and name in self._unknown):
                unwanted.append(stored)
        for stored in unwanted:
            try:
                await self._withdraw(stored)
            except (BusError, PeerError) as error:
                log.warning("withdrawal.doubtful", request=stored.record.key, error=str(error))
                self._soon = True
                break  # the worker may be stuck: the others would take as long
        return unknown

    async def _withdraw(self, stored: Stored) -> None:
        over = await self._placer.withdraw(stored.record)
        if over is None:  # it never came there, and cannot come any more
            await self._move(stored)

    # ------------------------------------------------------------ workers that are lost

    async def _recover(
        self, replica: ReplicaId, incarnation: str, records: Sequence[Stored]
    ) -> None:
        """Fence the incarnation, then let its requests go on from what the log says."""
        entries = await self._fenced_log(replica, incarnation)
        if entries is None:
            self._soon = True
            return
        stories = await fold_in_turns(entries, replica)
        log.info(
            "replica.recovered", replica=replica, incarnation=incarnation, requests=len(records)
        )
        for stored in records:
            record = stored.record
            story = stories.get((record.key, record.attempt, incarnation))
            await self._after(stored, story)

    async def _fenced_log(self, replica: ReplicaId, incarnation: str) -> list[LogEntry] | None:
        """The replica's log, once the incarnation cannot write to it; None: it lives after all."""
        subject = ack_log(replica)
        rows = await self._bus.acks.read(subject)
        entries = list(decode_log(rows))
        if not entries or isinstance(entries[-1], Fenced) or entries[-1].incarnation != incarnation:
            return entries  # another has written since: its appends fail
        fence = encode_entry(Fenced(incarnation=incarnation, by=self._owner))
        try:
            await self._bus.acks.append(subject, fence, rows[-1][0] if rows else 0)
        except WrongSequence:
            return None  # it still writes, or someone else has fenced it: look again
        log.warning("replica.fenced", replica=replica, incarnation=incarnation)
        return entries

    async def _after(self, stored: Stored, story: Story | None) -> None:
        """Applies what the log says of the record: an end, or the request goes on from there."""
        seen = stored.record
        ended = "" if story is None else story.ended
        if story is None:
            resume = seen.resume
        elif ended in life.FINAL and story.over is not None:
            resume = story.over.resume
        else:
            resume = story.resume(seen)

        def step(record: Record) -> Record | None:
            return life.lost(
                record,
                seen,
                self._owner,
                self._clock.unix_s(),
                resume=resume,
                why=ended,
                relegated=story is not None and story.relegated,
                limit=self._cfg.lost_limit,
            )

        if ended in life.FINAL:
            await self._end(seen.key, step)
        else:
            await self._go_on(stored, step, "its replica was lost")

    # ------------------------------------------------------------ steps

    async def _move(self, stored: Stored) -> None:
        """Nobody holds the request and nobody places it: it is ours now."""
        seen = stored.record
        await self._go_on(
            stored,
            lambda record: life.moved(record, seen, self._owner, self._clock.unix_s()),
            "it was not held",
        )

    async def _go_on(
        self, stored: Stored, step: Callable[[Record], Record | None], reason: str
    ) -> None:
        """Change the record by `step`; unless that ends the request, it is placed again."""
        changed = await self._ending.end(stored.record.key, step)
        if changed is None or changed.record.verdict is not None:
            return
        if changed.record.state == RecordState.RELEGATED:
            await self._bus.publish(subjects.RELEGATED, Hint(key=changed.record.key))
        else:
            if stored.record.attempt:
                await self._placer.publish_status(changed.record, "replaced", reason)
            self._feed(Opened(changed.record))

    async def _end(self, key: RequestKey, step: Callable[[Record], Record | None]) -> None:
        try:
            await self._ending.end(key, step)
        except BusTimeout:
            self._soon = True
