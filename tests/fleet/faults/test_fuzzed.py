"""Fuzz tests of a fleet's messages and store: no damaged or false message makes a service fail, and
requests that come afterwards are answered as ever.

The world is deterministic (tests/fleet/protocol/world.py), so a seed replays.
"""

import asyncio
from random import Random
from typing import Any

import msgspec
from hypothesis import given

from shared import schemas, subjects
from shared.client.client import Client, Patience
from shared.schemas import Verdict
from shared.vocabulary import ReplicaId, RequestKey
from tests.fleet.faults.liars import Liars
from tests.fleet.live import request_for
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.generated import encoded, few, near, seeds, tampered, valid
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

R0 = ReplicaId("r0")
KEYS = ["default.q0", "default.q1", "default.q2", "default.nobody"]
# what is received under which subject
RECEIVED: list[tuple[str, Any]] = [
    (subjects.requests("default", "chat"), schemas.GenerateRequest),
    (subjects.attach("default"), schemas.Attach),
    (subjects.explain("default"), schemas.Explain),
    (subjects.EXPLAIN_ALL, schemas.Explain),
    (subjects.history("default"), schemas.FindEnded),
    (subjects.HISTORY_ALL, schemas.FindEnded),
    (subjects.cancel(RequestKey(KEYS[0])), schemas.Cancel),
    (subjects.over(R0), schemas.AttemptOver),
    (subjects.RELEGATED, schemas.Hint),
    (subjects.digest(R0), schemas.Digest),
    (subjects.announce(R0), schemas.Announce),
    (subjects.announce(ReplicaId("x")), schemas.Announce),
    (subjects.offer(R0), schemas.Offer),
    (subjects.roster(R0), schemas.Roster),
    (subjects.hold(R0), schemas.Hold),
    (subjects.plan(R0), schemas.BatchPlan),
    (subjects.plan_refused(R0), schemas.PlanRefused),
    (subjects.acked(R0), schemas.PlanAck),
    (subjects.resync(R0), schemas.Resync),
    (subjects.withdraw(R0), schemas.Withdraw),
    (subjects.holdings(R0), schemas.Holdings),
]
# the answers on the subjects of one replica
ANSWERED: dict[str, Any] = {
    subjects.offer(R0): schemas.OfferAnswer,
    subjects.hold(R0): schemas.HoldAnswer,
    subjects.resync(R0): schemas.ResyncPage,
    subjects.withdraw(R0): schemas.Withdrawn,
    subjects.holdings(R0): schemas.HoldingsAnswer,
    subjects.over(R0): schemas.Settled,
}
# some of these draft
POLICIES: list[tuple[str, dict[str, str]]] = [
    ("qoserve", {}),
    ("slackline", {}),
    ("adaserve", {"budget_tokens": "24"}),
    ("vllm", {"spec_tokens": "3"}),
]
# the bucket, the beginning of the key and the value
STORED: list[tuple[str, str, Any]] = [
    (subjects.REQUESTS_BUCKET, "s.", schemas.Record),
    (subjects.REQUESTS_BUCKET, "o.", schemas.Resume),
    (subjects.BODIES_BUCKET, "", schemas.Body),
]


PATIENCE = Patience(give_up_s=60.0, submit_s=60.0, silence_s=1.0, silence_limit_s=5.0)


def likely(value: Any, world: World, rng: Random) -> Any:
    """The message with the names and numbers that the fleet has now, so that it is not turned away
    at the first check.
    """
    acks = [
        msgspec.msgpack.decode(payload, type=schemas.PlanAck)
        for _, payload in world.written
        if b"plan_seq" in payload
    ]
    if not isinstance(value, dict) or rng.random() < 0.2:
        return value
    value = dict(value)
    now = {"replica": "r0", "key": rng.choice(KEYS), "request_id": "q9", "tenant": "default"}
    if acks:
        last = acks[-1]
        now |= {
            "incarnation": last.incarnation,
            "epoch": last.epoch,
            "sync": 1,
            "seq": last.plan_seq + 1,
            "plan_seq": last.plan_seq,
            "ack_seq": last.ack_seq + 1,
            "attempt": 1,
        }
    return {**value, **{name: one for name, one in now.items() if name in value}}


async def pester(world: World, rng: Random) -> None:
    """Send made-up messages on all subjects, and now and then put a bad value into the store."""
    for _ in range(200):
        await asyncio.sleep(rng.random() * 0.02)
        subject, kind = rng.choice(RECEIVED)
        made = (valid if rng.random() < 0.5 else near)(kind, rng)
        raw = encoded(likely(made, world, rng), msgspec.msgpack.encode)
        world.net.inject(subject, tampered(raw, rng) if rng.random() < 0.1 else raw, {})
        if rng.random() < 0.05:
            bucket, prefix, kept = rng.choice(STORED)
            name = f"{prefix}default.odd{rng.randrange(10**9)}"
            raw = encoded(near(kept, rng), msgspec.msgpack.encode)
            world.ignored.add(name)
            getattr(world.net, bucket).create(name, raw, None, now_s=world.net.loop.time())


async def ask(client: Client, request_id: str) -> Verdict:
    """Run one ordinary request to its end."""
    request = request_for(20, request_id, prompt=None, token_ids=list(range(40, 80)))
    handle = await client.submit(request, "chat")
    async for _ in handle:
        pass
    return await handle.wait()


def fleet(rng: Random) -> World:
    policy, settings = rng.choice(POLICIES)
    scene = Scene(faults=CALM, policy=policy, settings=settings)
    world = World(scene, rng.randrange(2**32))
    for name in ("admission-0", "admission-1", "planner-0", "relegation-0"):
        world.start(name)
    for name in ("worker-r0", "worker-r1"):
        world.start(name)
    return world


async def serves_on(world: World, client: Client) -> None:
    """Wait until what was said falsely is forgotten; then everything works as ever."""
    await asyncio.sleep(30.0)
    async with asyncio.timeout(600.0):
        for verdict in await asyncio.gather(*(ask(client, f"after{n}") for n in range(6))):
            assert verdict.finish_reason == "length"
            assert verdict.output_tokens == 20
    for check in world.cores.values():
        check()
    assert not [error for planner in world.planners for error in planner.broken]


@few
@given(rng=seeds)
@virtual()
async def test_no_service_fails_of_any_message_or_record_and_the_fleet_serves_on(
    rng: Random,
) -> None:
    world = fleet(rng)
    bus = world.net.connect("clients")
    async with Client(bus, world.net.clock, patience=PATIENCE) as client:
        await asyncio.sleep(1.0)
        meanwhile = [asyncio.ensure_future(ask(client, f"q{n}")) for n in range(3)]
        await pester(world, rng)
        # they may have been ended in somebody's name, but they end
        await asyncio.wait(meanwhile, timeout=600.0)
        assert all(one.done() for one in meanwhile)
        await asyncio.gather(*meanwhile, return_exceptions=True)
        await serves_on(world, client)


@few
@given(rng=seeds)
@virtual()
async def test_who_lies_of_one_replica_costs_no_other_replica_a_request(rng: Random) -> None:
    """Its worker lies, and those who speak to it do, also in its log. When they stop, it begins
    anew: a worker that holds a request and tells its planner that it does not keeps it for ever.
    """
    world = fleet(rng)
    bus = world.net.connect("clients")
    async with Client(bus, world.net.clock, patience=PATIENCE) as client:
        await asyncio.sleep(1.0)
        said = {subject: kind for subject, kind in RECEIVED if f".{R0}" in subject}
        liars = Liars(world, rng, said, ANSWERED, subjects.ack_log(R0))
        meanwhile = []
        for n in range(24):
            await asyncio.sleep(rng.random() * 0.4)
            meanwhile.append(asyncio.ensure_future(ask(client, f"q{n}")))
            if rng.random() < 0.05:
                world.processes["worker-r0"].kill()
        await asyncio.sleep(2.0)
        liars.share = 0.0
        world.processes["worker-r0"].kill()
        await asyncio.wait(meanwhile, timeout=600.0)
        assert all(one.done() for one in meanwhile)
        for ended in await asyncio.gather(*meanwhile, return_exceptions=True):
            if isinstance(ended, Verdict) and ended.attempts == 1 and ended.replica != R0:
                assert ended.finish_reason == "length"
        await serves_on(world, client)
