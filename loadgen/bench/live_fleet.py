"""Observes a live fleet: timestamps of a client's events and of plans and acks on the bus."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from loadgen.bench.figure import Figure, spread
from loadgen.fleet.fleet import Fleet
from shared import subjects
from shared.bus.api import Call
from shared.bus.nats import NatsBus
from shared.client.client import Client, Handle
from shared.clock import Clock
from shared.columns import unpack_list
from shared.schemas import BatchPlan, Delta, GenerateRequest, PlanAck, Sampling, Status, StreamEvent
from shared.vocabulary import ReplicaId, RequestKey

DELTA_AIM_S = 0.002


@dataclass(slots=True)
class TimedRequest:
    """One request, with the instants at which its client sent it and received its events."""

    key: RequestKey
    sent_unix_s: float
    received_unix_s: float | None = None
    accepted_unix_s: float | None = None
    # (tokens before, received_unix_s)
    deltas: list[tuple[int, float]] = field(default_factory=list)


class Iteration(NamedTuple):
    """The ack of an iteration, and the instant at which we received its plan (None: never)."""

    ack: PlanAck
    plan_received_unix_s: float | None


class Late(NamedTuple):
    """A delta: its offset, its receipt, and how long after the end of its iteration that was."""

    offset: int
    received_unix_s: float
    late_s: float


class Observer:
    """Subscribes to the plans and acks of each replica. It shares the machine, and so the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans: dict[tuple[ReplicaId, int, int], float] = {}
        self.iterations: dict[ReplicaId, list[Iteration]] = {}

    async def listen(self, bus: NatsBus, replicas: list[ReplicaId]) -> None:
        for replica in replicas:
            self.iterations[replica] = []
            await bus.subscribe(subjects.plan(replica), BatchPlan, self._on_plan)
            await bus.subscribe(subjects.acked(replica), PlanAck, self._on_ack)

    def _on_plan(self, plan: BatchPlan, call: Call) -> None:
        self._plans[plan.replica, plan.epoch, plan.seq] = self._clock.unix_s()

    def _on_ack(self, ack: PlanAck, call: Call) -> None:
        self.iterations[ack.replica].append(
            Iteration(ack, self._plans.pop((ack.replica, ack.epoch, ack.plan_seq), None))
        )

    def late(self, requests: Sequence[TimedRequest]) -> list[Late]:
        """The deltas of these requests whose iteration was observed."""
        generated = self._generated_unix_s()
        return [
            Late(offset, received_unix_s, received_unix_s - generated[request.key, offset])
            for request in requests
            for offset, received_unix_s in request.deltas
            if (request.key, offset) in generated
        ]

    def _generated_unix_s(self) -> dict[tuple[RequestKey, int], float]:
        """[request, tokens before]: the end of the iteration that generated the next tokens."""
        generated: dict[tuple[RequestKey, int], float] = {}
        for iterations in self.iterations.values():
            at: dict[int, tuple[RequestKey, int]] = {}  # [slot] request, tokens before
            for ack, _ in iterations:
                at |= {held.slot: (held.key, held.offset) for held in ack.held}
                for slot, n in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
                    if n and slot in at:
                        key, offset = at[slot]
                        generated[key, offset] = ack.ended_unix_s
                        at[slot] = (key, offset + n)
        return generated


def delta_figures(part: str, late: Sequence[Late]) -> list[Figure]:
    first_s = [one.late_s for one in late if one.offset == 0]
    return [
        *spread(part, "first delta after its iteration's end", first_s, p50=DELTA_AIM_S),
        *spread(part, "any delta after its iteration's end", [one.late_s for one in late]),
    ]


class Caller:
    """Sends requests and timestamps their events in the callback that receives them."""

    def __init__(self, client: Client, bus: NatsBus, clock: Clock, rng: Random) -> None:
        self._client, self.bus, self.clock, self.rng = client, bus, clock, rng
        self.requests: list[TimedRequest] = []
        self._count = 0

    async def send(self, prompt_tokens: int, output_tokens: int, tier: str) -> Handle:
        """Submits a request and returns when it is received.

        The prompt is made of bytes, which are the tokens of the built-in tokenizer.
        """
        self._count += 1
        request = GenerateRequest(
            request_id=f"bench-{self.rng.getrandbits(32):08x}-{self._count}",
            tenant=subjects.DEFAULT_TENANT,
            prompt="x" * prompt_tokens,
            sampling=Sampling(max_tokens=output_tokens, ignore_eos=True),
        )
        timed = TimedRequest(
            subjects.request_key(request.tenant, request.request_id), self.clock.unix_s()
        )
        self.requests.append(timed)

        def sink(event: StreamEvent) -> None:
            match event:
                case Status(state="accepted") if timed.accepted_unix_s is None:
                    timed.accepted_unix_s = self.clock.unix_s()
                case Delta():
                    timed.deltas.append((event.offset, self.clock.unix_s()))

        handle = await self._client.submit(request, tier, sink=sink)
        timed.received_unix_s = self.clock.unix_s()
        return handle


@asynccontextmanager
async def observed(fleet: Fleet, seed: int) -> AsyncIterator[tuple[Caller, Observer]]:
    """A caller and, on a connection of its own, an observer."""
    clock = Clock()
    async with (
        fleet.connect("slackline-bench") as bus,
        fleet.connect("slackline-observer") as other,
    ):
        observer = Observer(clock)
        await observer.listen(other, fleet.replicas)
        async with Client(bus, clock) as client:
            yield Caller(client, bus, clock, Random(seed)), observer
