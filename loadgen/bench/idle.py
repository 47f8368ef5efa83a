"""One request at a time through a fleet that has nothing else to do: how long until it is accepted,
and until its first delta.
"""

import asyncio
import math
from contextlib import suppress

from loadgen.bench.figure import Figure, spread
from loadgen.bench.live_fleet import Bystander, Caller
from loadgen.fleet.child import Say
from shared import subjects
from shared.errors import PeerError
from shared.schemas import Attach, Replay

PART = "idle fleet"
ACCEPTED_AIM_S = 0.003
DELTA_AIM_S = 0.002
PAUSE_S = (0.02, 0.06)  # between the end of one and the next: so that every process sleeps
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 3
WARM_UP = 0.1  # of the count, before
SAY_EVERY = 50


async def measure(caller: Caller, bystander: Bystander, count: int, say: Say) -> list[Figure]:
    """`count` requests, each awaited to its end; and as many questions to admission that cost one
    round trip and one read.
    """
    warm_up = math.ceil(WARM_UP * count)
    for number in range(-warm_up, count):
        handle, _ = await caller.send(PROMPT_TOKENS, OUTPUT_TOKENS, "chat")
        await handle.wait()
        await asyncio.sleep(caller.rng.uniform(*PAUSE_S))
        if number > 0 and not number % SAY_EVERY:
            say(f"  {number} of {count} requests")
    asked = [await _ask(caller) for _ in range(min(count, 100))]
    noted = caller.noted[warm_up:]
    received = [n.received_unix_s - n.sent_unix_s for n in noted if n.received_unix_s is not None]
    accepted = [n.accepted_unix_s - n.sent_unix_s for n in noted if n.accepted_unix_s is not None]
    made = bystander.made_unix_s()
    first = [
        came - made[n.key, 0]
        for n in noted
        for offset, came in n.deltas[:1]
        if (n.key, offset) in made
    ]
    every = [
        came - made[n.key, offset]
        for n in noted
        for offset, came in n.deltas
        if (n.key, offset) in made
    ]
    return [
        *spread(PART, "request to accepted", accepted, "ms", p50=ACCEPTED_AIM_S),
        *spread(PART, "request to received", received, "ms"),
        *spread(PART, "first delta after its iteration's end", first, "ms", p50=DELTA_AIM_S),
        *spread(PART, "any delta after its iteration's end", every, "ms"),
        *spread(PART, "a question to admission with one read of the store", asked, "ms"),
    ]


async def _ask(caller: Caller) -> float:
    """Seconds until admission says that it does not know a request: what a round trip costs here,
    for comparison.
    """
    await asyncio.sleep(caller.rng.uniform(*PAUSE_S))
    began_unix_s = caller.clock.unix_s()
    with suppress(PeerError):
        await caller.bus.request(
            subjects.ATTACH, Attach(request_id="nobody"), Replay, timeout_s=2.0
        )
    return caller.clock.unix_s() - began_unix_s
