"""Tests of attacks on a running fleet by a tenant and by a stolen worker: the server and the
services let them do what docs/security.md says, and nothing else.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.bus.nats import NatsBus
from shared.bus.nats_client import OrderedClient
from shared.bus.users import Role, User
from shared.columns import pack
from shared.measure import Measure
from shared.schemas import AttemptOver, BatchPlan, Cancel, Record, Resume
from shared.store.records import Records
from shared.subjects import request_key
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass
from tests.fleet.live import (
    WAIT_S,
    Delivered,
    ask,
    check,
    client_of,
    connect_raw,
    replay_of,
    request_for,
    until_idle,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
VICTIM, MALLORY = User(Role.TENANT, "victim"), User(Role.TENANT, "mallory")
R1, R2 = ReplicaId("r1"), ReplicaId("r2")
TOKENS = 60
encode, encode_json = msgspec.msgpack.encode, msgspec.json.encode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    spec = FleetSpec(
        replicas=2,
        pace=1.0,
        gateway=False,
        drain_s=2.0,
        tenants=("victim", "mallory", "default"),
        environment={"SLACKLINE_ADMISSION_SWEEP_S": "2"},
    )
    async with Fleet(spec) as fleet:
        yield fleet


class Running:
    """A request of the victim that runs while it is attacked."""

    def __init__(self, bus: NatsBus, key: RequestKey, record: Record) -> None:
        self.bus, self.key, self.record = bus, key, record

    @property
    def replica(self) -> ReplicaId:
        assert self.record.replica is not None
        return self.record.replica

    @property
    def stranger(self) -> ReplicaId:
        """The replica that does not run it."""
        return R2 if self.replica == R1 else R1

    def forged_over(self) -> AttemptOver:
        return AttemptOver(
            key=self.key,
            attempt=self.record.attempt,
            replica=self.replica,
            incarnation=self.record.incarnation,
            why=FinishReason.STOP,
            relegated=False,
            service_class=ServiceClass.STANDARD,
            resume=Resume(
                tokens=pack([1]), text="words that no model said", measure=Measure(tokens=1)
            ),
        )

    async def forged_plan(self) -> BatchPlan:
        digest = asyncio.get_running_loop().create_future()
        listening = await self.bus.subscribe(
            subjects.plan(self.replica),
            BatchPlan,
            lambda plan, call: None if digest.done() else digest.set_result(plan),
        )
        seen: BatchPlan = await asyncio.wait_for(digest, WAIT_S)
        await listening.stop()
        return msgspec.structs.replace(
            seen,
            epoch=seen.epoch + 1,
            seq=seen.seq + 1,
            released=pack(range(64)),
            released_why=["stop"] * 64,
        )


@asynccontextmanager
async def attacked(fleet: Fleet) -> AsyncIterator[Running]:
    """Run a request of the victim; afterwards it has ended well, once, with its own tokens."""
    async with client_of(fleet) as (bus, client, wire):
        await until_idle(bus, fleet.replicas)
        request = request_for(TOKENS, tenant=VICTIM.name, prompt="a secret")
        asked = asyncio.create_task(ask(client, request))
        try:
            key = request_key(VICTIM.name, request.request_id)
            async with asyncio.timeout(WAIT_S):
                while not wire.events or not any(
                    getattr(event, "tokens", None)
                    for events in wire.events.values()
                    for event in events
                ):
                    await asyncio.sleep(0.01)
            stored = await Records(bus.requests, bus.bodies).get(key)
            assert stored is not None
            yield Running(bus, key, stored.record)
            assert not asked.done(), "the attack came while it ran"
            delivered: Delivered = await asked
            await check(bus, wire, [delivered])
            assert len(delivered.tokens) == TOKENS
        finally:
            asked.cancel()


async def refused(client: OrderedClient, attack: Any) -> bool:
    """Tells whether the server refused what `attack` does."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error))

    client._error_cb = note
    await attack
    await client.flush()
    return any("permissions violation" in error for error in errors)


async def stored_at(bus: NatsBus, log: str, content: bytes) -> int:
    """The place of an entry in a log, once it is there."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for seq, payload in await bus.acks.read(log):
                if payload == content:
                    return seq


async def test_a_tenant_forges_and_reads_nothing_by_what_it_may_send(fleet: Fleet) -> None:
    mallory = await connect_raw(fleet, MALLORY)
    async with attacked(fleet) as running:
        name = running.key.partition(".")[2]
        cancel = mallory.publish(subjects.cancel(running.key), encode(Cancel()))
        assert await refused(mallory, cancel), "the server has the table of permissions"
        # what it may send, with another's name or another's subject in it
        ask_victim = encode({"request_id": name, "tenant": VICTIM.name, "prompt": "x"})
        answer = await mallory.request(subjects.requests(MALLORY.name, "chat"), ask_victim, 30.0)
        assert msgspec.msgpack.decode(answer.data)["type"] == "refused"
        answer = await mallory.request(
            subjects.attach(MALLORY.name), encode({"request_id": name}), 30.0
        )
        assert msgspec.msgpack.decode(answer.data)["code"] == "not_found"
        answer = await mallory.request(
            subjects.explain(MALLORY.name), encode({"request_id": name}), 30.0
        )
        assert msgspec.msgpack.decode(answer.data)["code"] == "not_found"
        mine = encode({"request_id": "mine", "prompt": "x", "inbox": f"_INBOX.{VICTIM.name}.1"})
        answer = await mallory.request(subjects.requests(MALLORY.name, "chat"), mine, 30.0)
        assert msgspec.msgpack.decode(answer.data)["type"] == "refused"
        for reply in (
            f"$KV.requests.s.{running.key}",
            subjects.plan(running.replica),
            subjects.over(running.replica),
            f"_INBOX.{VICTIM.name}.1",
        ):
            await mallory.publish(
                subjects.attach(MALLORY.name), encode({"request_id": "x"}), reply=reply
            )
        await mallory.flush()
    await mallory.close()


async def test_a_stolen_worker_speaks_for_its_own_replica_alone(fleet: Fleet) -> None:
    async with attacked(fleet) as running:
        thief = await connect_raw(fleet, User(Role.WORKER, running.stranger))
        over = encode(running.forged_over())
        forged = thief.publish(subjects.over(running.replica), over)
        assert await refused(thief, forged), "the server has the table of permissions"
        # an end of another's attempt, in its own name
        await thief.publish(subjects.over(running.stranger), over)
        # JetStream answers wherever it is told to, in a name that may publish everywhere
        own_log = subjects.ack_log(running.stranger)
        plan = encode(await running.forged_plan())
        record = f"$KV.requests.s.{running.key}"
        before = await running.bus.requests.get(f"s.{running.key}")
        assert before is not None
        stream = subjects.log_stream(running.stranger)
        for content, target in (
            (plan, subjects.plan(running.replica)),
            (over, subjects.over(running.replica)),
            (encode(running.record), record),
        ):
            await thief.publish(own_log, content, reply=target)
            seq = await stored_at(running.bus, own_log, content)
            by_seq = encode_json({"seq": seq})
            await thief.publish(f"$JS.API.DIRECT.GET.{stream}", by_seq, reply=target)
            await thief.publish(f"$JS.API.STREAM.INFO.{stream}", b"", reply=target)
        answer = await thief.request(f"$JS.API.DIRECT.GET.{stream}", by_seq, 30.0)
        assert answer.data == encode(running.record), "JetStream has answered all that came before"
        after = await running.bus.requests.get(f"s.{running.key}")
        assert after is not None
        assert after.value == before.value
        await thief.close()


async def test_no_service_does_what_it_may_not(fleet: Fleet) -> None:
    """The permissions are no more than is needed, and no less."""
    async with client_of(fleet) as (bus, client, wire):
        for tenant in ("victim", "mallory"):
            requests = [request_for(20, tenant=tenant, prompt="a" * 300) for _ in range(4)]
            delivered = await asyncio.gather(*(ask(client, request) for request in requests))
            await check(bus, wire, delivered)
            assert (await replay_of(bus, requests[0])).verdict is not None
        await until_idle(bus, fleet.replicas)
    for child in fleet.processes:
        lines = [line for line in child.output().splitlines() if "iolation" in line]
        if child.name != "nats-server":
            assert lines == [], child.name
