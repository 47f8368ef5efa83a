"""Times one request after another in an idle fleet: until `accepted`, until the first delta."""

import asyncio
import math
from contextlib import suppress

from loadgen.bench.figure import Figure, spread
from loadgen.bench.live_fleet import Caller, Observer, delta_figures
from loadgen.fleet.child import Say
from shared import subjects
from shared.errors import PeerError
from shared.schemas import Attach, Replay

PART = "idle fleet"
ACCEPTED_AIM_S = 0.003
PAUSE_S = (0.02, 0.06)  # between two requests, so that every process sleeps
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 3
WARM_UP = 0.1  # additional requests before the measured ones, as a fraction of them
SAY_EVERY = 50  # requests


async def measure(caller: Caller, observer: Observer, count: int, say: Say) -> list[Figure]:
    """`count` requests, each awaited to its end, and then up to 100 questions to admission.

    A question costs one round trip and one read of the store.
    """
    warm_up = math.ceil(WARM_UP * count)
    for number in range(-warm_up, count):
        handle = await caller.send(PROMPT_TOKENS, OUTPUT_TOKENS, "chat")
        await handle.wait()
        await asyncio.sleep(caller.rng.uniform(*PAUSE_S))
        if number > 0 and not number % SAY_EVERY:
            say(f"  {number} of {count} requests")
    asked = [await _ask(caller) for _ in range(min(count, 100))]
    sent = caller.requests[warm_up:]
    received = [r.received_unix_s - r.sent_unix_s for r in sent if r.received_unix_s is not None]
    accepted = [r.accepted_unix_s - r.sent_unix_s for r in sent if r.accepted_unix_s is not None]
    return [
        *spread(PART, "request to accepted", accepted, p50=ACCEPTED_AIM_S),
        *spread(PART, "request to received", received),
        *delta_figures(PART, observer.late(sent)),
        *spread(PART, "a question to admission with one read of the store", asked),
    ]


async def _ask(caller: Caller) -> float:
    """The seconds until admission says that a request is unknown: a round trip on this machine."""
    await asyncio.sleep(caller.rng.uniform(*PAUSE_S))
    began_unix_s = caller.clock.unix_s()
    with suppress(PeerError):
        await caller.bus.request(
            subjects.attach(subjects.DEFAULT_TENANT),
            Attach(request_id="nobody"),
            Replay,
            timeout_s=2.0,
        )
    return caller.clock.unix_s() - began_unix_s
