"""Tests of the service of relegation: it learns from planners which prefixes replicas keep."""

import asyncio
from random import Random

from services.relegation.config import RelegationConfig
from services.relegation.service import Relegation
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.core.prefixes.kept import KeptPrefixes
from shared.prefix import prefix_of
from shared.schemas import AskPrefixes
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import ReplicaId
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.process import EPOCH_UNIX_S
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing
R = ReplicaId("r")


@virtual()
async def test_one_that_begins_to_lead_asks_a_planner_for_what_digests_told_before():
    net, kept = SimNet(Random(1), Faults()), KeptPrefixes(16)
    answers: list[asyncio.Task[None]] = []
    kept.change(prefix_of(range(5)), b"")
    kept.tell()  # before it led
    planner = net.connect("planner")

    def answer(_ask: AskPrefixes, call: Call) -> None:
        answers.append(asyncio.create_task(call.reply(kept.all())))

    endpoint = Endpoint("prefixes", subjects.prefixes(R), AskPrefixes, answer)
    await planner.serve("planner", [endpoint], {})
    service = Relegation(RelegationConfig(), net.connect("a"), net.clock, Tracing(), Random(2))
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    lacking = []
    for n in range(40):
        await asyncio.sleep(0.1)
        seq, more, fewer = kept.tell()
        digest = made.digest(
            R,
            at_unix_s=EPOCH_UNIX_S + n / 10,
            prefix_seq=seq,
            prefixes_kept=more,
            prefixes_dropped=fewer,
        )
        await planner.publish(subjects.digest(R), digest)
        lacking.append(list(service.core.lacking))
    stop.set()
    await running
    assert [R] in lacking and lacking[-1] == []
    assert len(answers) == 1
