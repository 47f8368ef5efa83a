"""Strangers on the bus: no service dies of what they publish, and every request still ends.

The world is deterministic (tests/fleet/protocol/world.py).
"""

import asyncio
import random

import msgspec
import pytest

from shared import subjects
from shared.schemas import Announce, AttemptOver, BatchPlan, Hint, PlanAck, Resume, Resync
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass
from tests import made
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.simulated.virtual_loop import virtual

QUIET = True

encode = msgspec.msgpack.Encoder().encode


def announce(replica: str, profile: str) -> Announce:
    return made.announce(
        replica,
        incarnation="stranger",
        profile=profile,
        kv_blocks=1,
        context_tokens=16,
        max_slots=1,
    )


def over(key: str) -> AttemptOver:
    return AttemptOver(
        key=RequestKey(key),
        attempt=1,
        replica=ReplicaId("r0"),
        incarnation="stranger",
        why="stop",
        relegated=False,
        service_class=ServiceClass.STANDARD,
        resume=Resume(),
    )


def plan(world: World) -> BatchPlan:
    """A plan with the right names, whose columns do not fit each other."""
    log = [
        msgspec.msgpack.decode(payload, type=PlanAck)
        for subject, payload in world.written
        if b"plan_seq" in payload
    ]
    last = log[-1] if log else None
    return made.plan(
        [0, 1, 9999],
        [1],
        replica=ReplicaId("r0"),
        incarnation=last.incarnation if last else "?",
        epoch=last.epoch if last else 1,
        seq=last.plan_seq + 1 if last else 1,
    )


async def pester(world: World) -> None:
    rng = random.Random(world.seed)
    for _ in range(60):
        await asyncio.sleep(rng.random() * 0.06)
        r0 = ReplicaId("r0")
        ragged = made.ack(replica=r0, incarnation="stranger", slots=b"123", computed=b"")
        messages = [
            (subjects.over(r0), encode(over("a b"))),
            (subjects.over(r0), encode(over("default.nobody"))),
            (subjects.RELEGATED, encode(Hint(key=RequestKey("a b.>")))),
            (subjects.announce(ReplicaId("x1")), encode(announce("x1", "/no/such/profile.json"))),
            (subjects.announce(ReplicaId("x2")), encode(announce("x y", "a100-llama3-8b"))),
            (subjects.plan(r0), encode(plan(world))),
            (subjects.acked(r0), encode(ragged)),
            ("slo.v1.cancel.a.b", b"\xc1garbage"),
            ("slo.v1.requests.default.chat", b"\x00" * 2_000_000),
            (subjects.resync(r0), encode(Resync(epoch=2**53 - 1, sync=1))),
            (subjects.resync(r0), encode({"epoch": 2**64 - 1, "sync": 1})),
            (subjects.hold(r0), rng.randbytes(40)),
            (subjects.withdraw(r0), b""),
            (subjects.digest(r0), b"{}"),
        ]
        subject, payload = rng.choice(messages)
        world.net.inject(subject, payload, {})


@pytest.mark.parametrize("seed", range(12))
@virtual()
async def test_no_service_dies_of_what_strangers_publish(seed: int) -> None:
    deaths: list[str] = []
    world = World(Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, policy="fcfs"), seed)
    started: list[str] = []
    start = world.start

    def counted(name: str) -> None:
        started.append(name)
        start(name)

    world.start = counted  # type: ignore[method-assign]
    for name, value in (("s.default.odd", b"\xc1"), ("s.default.odd2", b"{}"), ("o.x", b"")):
        world.net.requests.create(name, value, None, now_s=world.net.loop.time())
    pest = asyncio.ensure_future(pester(world))
    for odd in ("s.default.odd", "s.default.odd2"):
        assert world.net.requests.get(odd, now_s=0.0) is not None
    world.ignored = {"s.default.odd", "s.default.odd2"}
    await world.play()
    await pest
    deaths.extend(name for name in set(started) if started.count(name) > 1)
    assert not deaths, f"seed {seed}: {deaths} died"


@virtual()
async def test_a_body_that_no_record_names_is_deleted() -> None:
    calm = Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, requests=3)
    world = World(calm, seed=1)
    world.net.bodies.create("default.nobody.0", b"", None, now_s=world.net.loop.time())
    await world.play()  # waits until no body is left
    assert world.net.bodies.get("default.nobody.0", now_s=world.net.loop.time()) is None
