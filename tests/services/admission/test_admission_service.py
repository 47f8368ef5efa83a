"""Tests of the admission service beside a made-up planner that declines every offer."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from services.admission.config import AdmissionConfig
from services.admission.placement import TELL_S
from services.admission.service import Admission
from services.admission.tokenizers import Tokenizers
from shared import subjects
from shared.bus.api import Call, Endpoint, RefusedError
from shared.schemas import (
    GenerateRequest,
    Offer,
    OfferAccepted,
    OfferDeclined,
    PoolDigest,
    PoolLane,
    Received,
    Sampling,
)
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import ReplicaId, Slo
from tests.shared.routing.digests import digest
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

R = ReplicaId("r1")
LANE = PoolLane(tenant="default", importance=1.0, weight=1.0, requests=9, tokens=7_000_000)
FULL = PoolDigest(tokens_s=100.0, lanes=[LANE])
EMPTY = PoolDigest(tokens_s=100.0, lanes=[])


class Beside:
    """One admission service on a simulated bus, and one connection that plays everybody else."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.net, self._stop = SimNet(Random(1), faults or Faults()), asyncio.Event()
        self.bus = self.net.connect("others")

    async def begin(self, on_offer: Callable[[Offer, Call], None], pool: PoolDigest) -> None:
        admission = Admission(
            AdmissionConfig(),
            self.net.connect("admission"),
            self.net.clock,
            Tokenizers(),
            Tracing(),
            Random(2),
        )
        self._running = asyncio.create_task(admission.run(self._stop))
        await self.bus.serve("seat", [Endpoint("offer", subjects.offer(R), Offer, on_offer)], {})
        await asyncio.sleep(1.0)
        await self.bus.publish(
            subjects.digest(R), replace(digest(R), at_unix_s=self.net.clock.unix_s())
        )
        await self.bus.publish(subjects.POOL, pool)
        await asyncio.sleep(0.1)

    async def ask(self, name: str = "a", tenant: str = "default") -> Received:
        request = GenerateRequest(
            request_id=name,
            token_ids=[40, 41],
            sampling=Sampling(max_tokens=5),
            slo=Slo(ttft_s=1.0, tbt_s=0.1),
        )
        subject = subjects.requests(tenant, "chat")
        return await self.bus.request(subject, request, Received, timeout_s=5.0)

    async def end(self) -> None:
        self._stop.set()
        await self._running


@virtual()
async def test_a_client_hears_at_once_that_its_request_is_in_the_pool() -> None:
    """The pool was full as it came, and has room as its only replica declines."""
    beside, answers = Beside(), list[asyncio.Task[None]]()

    async def decline(call: Call) -> None:
        await beside.bus.publish(subjects.POOL, EMPTY)
        await asyncio.sleep(0.1)
        await call.reply(OfferDeclined(reason="it is late"))

    def on_offer(_: Offer, call: Call) -> None:
        answers.append(asyncio.ensure_future(decline(call)))

    await beside.begin(on_offer, FULL)
    began_s = beside.net.loop.time()
    await beside.ask()
    took_s = beside.net.loop.time() - began_s
    assert len(answers) == 1
    await beside.end()
    assert took_s < TELL_S / 2


@virtual()
async def test_a_flood_of_one_tenant_is_refused_and_keeps_no_other_tenant_out() -> None:
    """Each hop takes 30 ms, so that 4,000 requests a second find no room."""
    beside, heard = Beside(Faults(latency_s=(0.02, 0.04))), Counter[str]()
    loop, took_s = asyncio.get_running_loop(), list[float]()

    def on_offer(_: Offer, call: Call) -> None:
        answering.create_task(call.reply(OfferAccepted()))

    async def flood(name: str) -> None:
        try:
            await beside.ask(name, "mallory")
            heard["received"] += 1
        except RefusedError as error:
            heard[error.refused.code] += bool(error.refused.retry_after_s)

    async def bystander(name: str) -> None:
        began_s = loop.time()
        await beside.ask(name, "bystander")
        took_s.append(loop.time() - began_s)

    async with asyncio.TaskGroup() as answering, asyncio.TaskGroup() as asking:
        await beside.begin(on_offer, EMPTY)
        for n in range(20):
            for m in range(200):
                asking.create_task(flood(f"{n}-{m}"))
            asking.create_task(bystander(f"{n}"))
            await asyncio.sleep(0.05)
    await beside.end()
    assert len(took_s) == 20
    assert max(took_s) < 0.5, "of eight hops"
    assert heard["received"] >= AdmissionConfig().receive_limit
    assert heard["received"] + heard["slow_down"] == 4000
