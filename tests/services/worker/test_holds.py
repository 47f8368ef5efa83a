"""Tests of holds that wait for KV of another replica."""

import asyncio
from collections.abc import Sequence
from random import Random

import pytest

from services.worker.config import WorkerConfig
from services.worker.endpoints.holds import Holds
from services.worker.engines.make import make
from services.worker.step_runner import StepRunner
from shared.bus.api import Endpoint
from shared.columns import pack
from shared.core.record.record import cancelled
from shared.process.chores import Chores
from shared.schemas import Body, Hold, HoldAnswer, KvAt, OfferAccepted, OfferDeclined, Sampling
from shared.store.records import Records
from shared.vocabulary import ReplicaId
from tests import made
from tests.simulated.bus import SimNet
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import run_virtual


class Brings:
    """A mover whose fetch lasts a second, after which so many positions are here."""

    address, move_s = "here:1", 1e-6

    def __init__(self, tokens: int) -> None:
        self._tokens, self.begun = tokens, asyncio.Event()

    def ahead(self, key: str, tokens: Sequence[int], salt: bytes, address: str) -> None:
        """Nothing comes ahead."""

    async def fetch(
        self, key: str, tokens: Sequence[int], salt: bytes, address: str, within_s: float
    ) -> int:
        self.begun.set()
        await asyncio.sleep(1.0)
        return self._tokens

    def forget(self, key: str) -> None:
        """It brings it nevertheless."""


def held(brings: int, cancel: bool) -> tuple[HoldAnswer, list[int]]:
    """The answer to a hold of a request whose KV another replica has, and the positions counted as
    fetched. `cancel`: its client cancels it while the KV is on its way.
    """
    counted: list[int] = []

    async def main() -> HoldAnswer:
        net, mover = SimNet(Random(0)), Brings(brings)
        bus = net.connect("worker")
        records = Records(bus.requests, bus.bodies)
        place = {"replica": ReplicaId("r1"), "incarnation": "i", "attempt": 1}
        at = KvAt(replica=ReplicaId("r2"), address="there:1", tokens=10)
        record = made.record("t.q", body_key="t.q.b", kv=at, **place)
        await records.create(record, Body(prompt=pack(list(range(10))), sampling=Sampling()))
        runner = VirtualRunner(StepRunner(*make(WorkerConfig(engine="sim"))))
        async with Chores() as chores:
            holds = Holds(
                made.worker_core(),
                records,
                runner,
                net.clock,
                chores,
                mover,
                lambda: False,
                lambda _hold, _record, _before: None,
                lambda tokens, _seconds: counted.append(tokens),
            )
            await bus.serve("worker", [Endpoint("hold", "hold", Hold, holds.on_hold)], {})
            hold = Hold(epoch=1, sync=1, slot=0, key=record.key, attempt=1, fetch_s=2.0)
            asked = asyncio.create_task(
                net.connect("planner").request("hold", hold, HoldAnswer, timeout_s=10.0)
            )
            await mover.begun.wait()
            if cancel:
                await records.change(record.key, cancelled)
            return await asked

    return run_virtual(main()), counted


@pytest.mark.parametrize("brings", [0, 8])
def test_a_request_is_held_with_what_has_come_of_its_kv(brings: int) -> None:
    assert held(brings, cancel=False) == (OfferAccepted(kv_tokens=brings), [brings])


@pytest.mark.parametrize("brings", [0, 8])
def test_a_request_that_is_cancelled_while_its_kv_comes_is_not_held(brings: int) -> None:
    answer, _ = held(brings, cancel=True)
    assert isinstance(answer, OfferDeclined)
