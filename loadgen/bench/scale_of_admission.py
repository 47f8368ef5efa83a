"""The requests a second that one admission brings in and ends, and two.

The bench plays clients, planners and workers: every offer is accepted at once, and every request
ends as soon as it was accepted.
"""

import asyncio
import itertools
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import Self

from loadgen.bench.figure import Figure, spread
from loadgen.bench.lone_services import lone_services
from loadgen.fleet.child import Say
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.process.chores import Chores
from shared.schemas import (
    Announce,
    AttemptOver,
    Digest,
    End,
    GenerateRequest,
    Holdings,
    HoldingsAnswer,
    Offer,
    OfferAccepted,
    Received,
    Resume,
    Sampling,
    Settled,
    Status,
    StreamEvent,
)
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass

PART = "scale, admission"
REPLICAS = [ReplicaId(f"r{n}") for n in range(1, 5)]
CALLERS = 64  # each sends a request as soon as its last one has ended
MEASURE_S, QUICK_S = 8.0, 1.0
SETTLE_S = 1.0
PROMPT, MAX_TOKENS, TENANT, TIER = "x" * 500, 200, subjects.DEFAULT_TENANT, "chat"
KV_BLOCKS, SLOTS, CONTEXT_TOKENS, BLOCK_TOKENS = 80_000, 4096, 8192, 16
HEARTBEAT_S = 0.1
ANSWER_S = 10.0
INCARNATION = "i1"
EVERY = ReplicaId(subjects.EVERY)


class ServedRequests:
    """Clients, and a fleet that takes every request; use it as an async context."""

    def __init__(self, bus: Bus, clock: Clock, rng: Random) -> None:
        self.accepted_s: list[float] = []  # of each request that ended: until it was accepted
        self._bus, self._clock = bus, clock
        self._name = f"scale-{rng.getrandbits(32):08x}"
        self._inbox = f"{subjects.inbox(TENANT)}.{self._name}"
        self._chores = Chores()
        self._tasks: list[asyncio.Task[None]] = []
        self._events: dict[str, asyncio.Queue[StreamEvent]] = {}

    async def __aenter__(self) -> Self:
        await self._chores.__aenter__()
        bus, chores = self._bus, self._chores
        chores.listen(await bus.subscribe(f"{self._inbox}.*", StreamEvent, self._on_event))
        endpoints = [
            Endpoint("offer", subjects.offer(EVERY), Offer, self._on_offer),
            Endpoint("holdings", subjects.holdings(EVERY), Holdings, self._on_holdings),
        ]
        chores.listen(await bus.serve("seat", endpoints, {}))
        self._tasks.append(chores.start(self._beat(), "bench.heartbeats"))
        await asyncio.sleep(SETTLE_S)
        for caller in range(CALLERS):
            self._tasks.append(chores.start(self._call(str(caller)), "bench.caller"))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._chores.__aexit__(kind, error, trace)

    async def _call(self, caller: str) -> None:
        """One request after the other; one that is refused or not answered counts for nothing."""
        for number in itertools.count(1):
            with suppress(BusError, PeerError, TimeoutError):
                self.accepted_s.append(await self._one(f"{caller}-{number}"))

    async def _one(self, name: str) -> float:
        """Send a request, see it to its end, and return the seconds until it was accepted."""
        began_unix_s = self._clock.unix_s()
        inbox = f"{self._inbox}.{name}"
        request = GenerateRequest(
            request_id=f"{self._name}-{name}",
            prompt=PROMPT,
            sampling=Sampling(max_tokens=MAX_TOKENS),
            inbox=inbox,
        )
        events = self._events[inbox] = asyncio.Queue()
        try:
            await self._bus.request(
                subjects.requests(TENANT, TIER), request, Received, timeout_s=ANSWER_S
            )
            async with asyncio.timeout(ANSWER_S):
                while not isinstance(event := await events.get(), Status):
                    pass
                accepted_s = self._clock.unix_s() - began_unix_s
                await self._end(subjects.request_key(TENANT, request.request_id), event)
                while not isinstance(await events.get(), End):
                    pass
            return accepted_s
        finally:
            del self._events[inbox]

    async def _end(self, key: RequestKey, accepted: Status) -> None:
        assert accepted.replica is not None, "an accepted request has a replica"
        over = AttemptOver(
            key=key,
            attempt=accepted.attempt,
            replica=accepted.replica,
            incarnation=INCARNATION,
            why=FinishReason.STOP,
            relegated=False,
            service_class=ServiceClass.STANDARD,
            resume=Resume(),
        )
        await self._bus.request(subjects.over(accepted.replica), over, Settled, timeout_s=ANSWER_S)

    async def _beat(self) -> None:
        while True:
            now_unix_s = self._clock.unix_s()
            for replica in REPLICAS:
                await self._bus.publish(
                    subjects.announce(replica), announcement(replica, now_unix_s)
                )
                await self._bus.publish(subjects.digest(replica), digest(replica, now_unix_s))
            await asyncio.sleep(HEARTBEAT_S)

    def _on_event(self, event: StreamEvent, call: Call) -> None:
        if call.subject in self._events:
            self._events[call.subject].put_nowait(event)

    def _on_offer(self, _: Offer, call: Call) -> None:
        self._chores.spawn(call.reply(OfferAccepted()), "bench.accept")

    def _on_holdings(self, holdings: Holdings, call: Call) -> None:
        answer = HoldingsAnswer(incarnation=INCARNATION, known=[True] * len(holdings.asked))
        self._chores.spawn(call.reply(answer), "bench.holdings")


def announcement(replica: ReplicaId, now_unix_s: float) -> Announce:
    return Announce(
        replica=replica,
        incarnation=INCARNATION,
        at_unix_s=now_unix_s,
        model="m",
        engine="sim",
        profile="a100-llama3-8b",
        pool="",
        kv_blocks=KV_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        max_slots=SLOTS,
        epoch=1,
    )


def digest(replica: ReplicaId, now_unix_s: float) -> Digest:
    return Digest(
        replica=replica,
        incarnation=INCARNATION,
        planner="p1",
        at_unix_s=now_unix_s,
        model="m",
        pool="",
        waiting=0,
        running=0,
        best_effort=0,
        waiting_prefill_tokens=0,
        backlog_s=0.0,
        kv_blocks=KV_BLOCKS,
        kv_free_blocks=KV_BLOCKS,
        free_slots=SLOTS,
        surplus=True,
    )


async def measure(quick: bool, rng: Random, say: Say) -> list[Figure]:
    one, two = [await _with_admissions(n, quick, rng, say) for n in (1, 2)]
    return one + two


async def _with_admissions(admissions: int, quick: bool, rng: Random, say: Say) -> list[Figure]:
    clock = Clock()
    async with lone_services([], say) as services:
        for _ in range(admissions):
            await services.start("admission")
        async with ServedRequests(services.bus, clock, rng) as served:
            await asyncio.sleep(SETTLE_S)
            done, cpu_s, unix_s = len(served.accepted_s), services.cpu_s(), clock.unix_s()
            await asyncio.sleep(QUICK_S if quick else MEASURE_S)
            took_s, used_s = clock.unix_s() - unix_s, services.cpu_s() - cpu_s
            accepted_s = served.accepted_s[done:]
    count = len(accepted_s)
    say(f"  {admissions} x admission: {count / took_s:.0f} requests/s")
    name = f"{admissions} of them: " if admissions > 1 else ""
    return [
        Figure(
            part=PART,
            name=f"{name}requests brought in and ended",
            value=count / took_s,
            unit="/s",
            note=f"{CALLERS} at a time; {used_s / took_s:.2f} cores",
        ),
        *spread(PART, f"{name}request to accepted, so busy", accepted_s, "ms"),
        Figure(
            part=PART,
            name=f"{name}CPU of a request",
            value=used_s / count if count else None,
            unit="ms",
        ),
    ]
