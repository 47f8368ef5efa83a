"""Faults inside a process: Python imports this file at its start, where its folder is on
PYTHONPATH.

CHAOS_SKEW_S: the wall clock is off by so many seconds. CHAOS_ACKS: `slow` or `wrong`, the acks of a
worker come late, or say something else than the log.
"""

import asyncio
import os
import random
import time

from msgspec.structs import replace

SLOW_S = 0.3


def skew(by_s: float) -> None:
    true_s = time.time
    time.time = lambda: true_s() + by_s


def spoil_acks(how: str, rng: random.Random, replica: str = "") -> None:
    """`replica`: only the acks of this one; empty: of all workers of the process."""
    from services.worker.service import WorkerService
    from shared.columns import pack, unpack_list
    from shared.schemas import PlanAck

    stored = WorkerService._stored

    async def late(self, finished):
        if not replica or self._replica == replica:
            await asyncio.sleep(SLOW_S * rng.random())
        await stored(self, finished)

    def wrong(ack: PlanAck) -> PlanAck:
        """A random falsehood."""
        computed = unpack_list(ack.computed)
        return rng.choice(
            (
                replace(ack, plan_seq=ack.plan_seq + rng.randint(-2, 2)),
                replace(ack, ack_seq=ack.ack_seq + rng.randint(-2, 2)),
                replace(ack, computed=pack([n + rng.randint(0, 9) for n in computed])),
                replace(ack, slots=b"", computed=b"", emitted=b""),
                replace(ack, exec_s=ack.exec_s * 100.0),
            )
        )

    async def false(self, finished):
        if (not replica or self._replica == replica) and rng.random() < 0.1:
            finished = finished._replace(ack=wrong(finished.ack))
        await stored(self, finished)

    WorkerService._stored = {"slow": late, "wrong": false}[how]


if "CHAOS_SKEW_S" in os.environ:
    skew(float(os.environ["CHAOS_SKEW_S"]))
if "CHAOS_ACKS" in os.environ:
    spoil_acks(os.environ["CHAOS_ACKS"], random.Random(0))
