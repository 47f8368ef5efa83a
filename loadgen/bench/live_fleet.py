"""What the parts that need a fleet share: a client that notes when each event came, and the plans
and acks as they pass by.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from loadgen.fleet.fleet import Fleet
from shared import subjects
from shared.bus.api import Call
from shared.bus.nats import NatsBus, connect
from shared.client.client import Client, Handle
from shared.clock import Clock
from shared.columns import unpack_list
from shared.schemas import BatchPlan, Delta, GenerateRequest, PlanAck, Sampling, Status, StreamEvent
from shared.vocabulary import ReplicaId, RequestKey


@dataclass(slots=True)
class Noted:
    """One request and the instants at which its client heard of it."""

    key: RequestKey
    sent_unix_s: float
    received_unix_s: float | None = None
    accepted_unix_s: float | None = None
    deltas: list[tuple[int, float]] = field(default_factory=list)  # (tokens before it, came_unix_s)


class Ran(NamedTuple):
    """One iteration, as its ack tells, and when our own subscription had its plan; None where that
    was not seen.
    """

    ack: PlanAck
    plan_came_unix_s: float | None


class Bystander:
    """Hears everything that planner and worker of each replica say, on a machine of the same
    clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._plans: dict[tuple[ReplicaId, int, int], float] = {}
        self.ran: dict[ReplicaId, list[Ran]] = {}

    async def listen(self, bus: NatsBus, replicas: list[ReplicaId]) -> None:
        for replica in replicas:
            self.ran[replica] = []
            await bus.subscribe(subjects.plan(replica), BatchPlan, self._on_plan)
            await bus.subscribe(subjects.acked(replica), PlanAck, self._on_ack)

    def _on_plan(self, plan: BatchPlan, call: Call) -> None:
        self._plans[plan.replica, plan.epoch, plan.seq] = self._clock.unix_s()

    def _on_ack(self, ack: PlanAck, call: Call) -> None:
        self.ran[ack.replica].append(
            Ran(ack, self._plans.pop((ack.replica, ack.epoch, ack.plan_seq), None))
        )

    def made_unix_s(self) -> dict[tuple[RequestKey, int], float]:
        """(request, tokens before) -> the end of the iteration that made the next ones."""
        made: dict[tuple[RequestKey, int], float] = {}
        for ran in self.ran.values():
            at: dict[int, tuple[RequestKey, int]] = {}
            for ack, _ in ran:
                at |= {held.slot: (held.key, held.offset) for held in ack.held}
                for slot, n in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
                    if n and slot in at:
                        key, offset = at[slot]
                        made[key, offset] = ack.ended_unix_s
                        at[slot] = (key, offset + n)
        return made


class Caller:
    """Sends requests and notes what comes back, in the callback that received it."""

    def __init__(self, client: Client, bus: NatsBus, clock: Clock, rng: Random) -> None:
        self._client, self.bus, self.clock, self.rng = client, bus, clock, rng
        self.noted: list[Noted] = []
        self._count = 0

    async def send(self, prompt_tokens: int, output_tokens: int, tier: str) -> tuple[Handle, Noted]:
        """A prompt of the built-in tokenizer's tokens, bytes."""
        self._count += 1
        request = GenerateRequest(
            request_id=f"bench-{self.rng.getrandbits(32):08x}-{self._count}",
            prompt="x" * prompt_tokens,
            sampling=Sampling(max_tokens=output_tokens, ignore_eos=True),
        )
        noted = Noted(subjects.request_key(request.tenant, request.request_id), self.clock.unix_s())
        self.noted.append(noted)

        def sink(event: StreamEvent) -> None:
            match event:
                case Status(state="accepted") if noted.accepted_unix_s is None:
                    noted.accepted_unix_s = self.clock.unix_s()
                case Delta():
                    noted.deltas.append((event.offset, self.clock.unix_s()))

        handle = await self._client.submit(request, tier, sink=sink)
        noted.received_unix_s = self.clock.unix_s()
        return handle, noted


@asynccontextmanager
async def calling(fleet: Fleet, seed: int) -> AsyncIterator[tuple[Caller, Bystander]]:
    """A client and, on a connection of its own, a bystander."""
    clock = Clock()
    async with (
        connect(fleet.url, "slackline-bench") as bus,
        connect(fleet.url, "slackline-bystander") as other,
    ):
        bystander = Bystander(clock)
        await bystander.listen(other, fleet.replicas)
        async with Client(bus, clock) as client:
            yield Caller(client, bus, clock, Random(seed)), bystander
