"""Clients of an admission, and a fleet that takes every request.

Every offer is accepted at once, and every request ends as soon as it was accepted.
"""

import asyncio
import itertools
from contextlib import suppress

from loadgen.bench.beside import EVERY, Beside, digest
from loadgen.bench.figure import Figure, spread
from loadgen.bench.stand_in import INCARNATION, KV_BLOCKS, announcement
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.errors import BusError, PeerError
from shared.schemas import (
    AttemptOver,
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

REPLICAS = [ReplicaId(f"r{n}") for n in range(1, 5)]
PROFILE = "a100-llama3-8b"
CALLERS = 64  # each sends a request as soon as its last one has ended
HEARD_S = 1.0  # until the heartbeats are heard
HEARTBEAT_S = 0.1
ANSWER_S = 10.0
PROMPT, SAMPLING = "x" * 500, Sampling(max_tokens=200)
TENANT, TIER = subjects.DEFAULT_TENANT, "chat"


class BesideAdmission(Beside):
    """A unit is a request that was brought in and ended."""

    note = f"{CALLERS} at a time"

    async def load(self, quick: bool) -> None:
        self._accepted_s: list[float] = []  # of each request that ended: until it was accepted
        self._name = f"scale-{self._rng.getrandbits(32):08x}"
        self._inbox = f"{subjects.inbox(TENANT)}.{self._name}"
        self._events: dict[str, asyncio.Queue[StreamEvent]] = {}
        events = await self._bus.subscribe(f"{self._inbox}.*", StreamEvent, self._on_event)
        self._chores.listen(events)
        endpoints = [
            Endpoint("offer", subjects.offer(EVERY), Offer, self._on_offer),
            Endpoint("holdings", subjects.holdings(EVERY), Holdings, self._on_holdings),
        ]
        self._chores.listen(await self._bus.serve("seat", endpoints, {}))
        self._start(self._beat())
        await asyncio.sleep(HEARD_S)
        for caller in range(CALLERS):
            self._start(self._call(str(caller)))

    def reset(self) -> None:
        self._accepted_s.clear()

    @property
    def done(self) -> int:
        return len(self._accepted_s)

    def figures(self, part: str, prefix: str) -> list[Figure]:
        return spread(part, f"{prefix}request to accepted, so busy", self._accepted_s)

    async def _call(self, caller: str) -> None:
        """One request after the other; one that is refused or not answered counts for nothing."""
        for number in itertools.count(1):
            with suppress(BusError, PeerError, TimeoutError):
                self._accepted_s.append(await self._one(f"{caller}-{number}"))

    async def _one(self, name: str) -> float:
        """Send a request, see it to its end, and return the seconds until it was accepted."""
        began_unix_s = self._clock.unix_s()
        inbox = f"{self._inbox}.{name}"
        request = GenerateRequest(
            request_id=f"{self._name}-{name}", prompt=PROMPT, sampling=SAMPLING, inbox=inbox
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
                announced = announcement(replica, PROFILE, now_unix_s, epoch=1)
                await self._bus.publish(subjects.announce(replica), announced)
                told = digest(replica, INCARNATION, KV_BLOCKS, now_unix_s)
                await self._bus.publish(subjects.digest(replica), told)
            await asyncio.sleep(HEARTBEAT_S)

    def _on_event(self, event: StreamEvent, call: Call) -> None:
        if call.subject in self._events:
            self._events[call.subject].put_nowait(event)

    def _on_offer(self, _: Offer, call: Call) -> None:
        self._chores.spawn(call.reply(OfferAccepted()), "bench.accept")

    def _on_holdings(self, holdings: Holdings, call: Call) -> None:
        answer = HoldingsAnswer(incarnation=INCARNATION, known=[True] * len(holdings.asked))
        self._chores.spawn(call.reply(answer), "bench.holdings")
