"""Offers an open-loop load: every request is sent at its planned instant, whatever became of the
requests before it. Only a later round of a session waits: it is sent when the round before it has
ended well and its pause is over.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from loadgen.load.mix import PlannedRequest
from loadgen.load.session import rounds
from loadgen.load.tally import Outcome, Tally
from shared.client.client import Now

CLOSING_S = 5.0  # longest wait for the cancelling of what still runs at the end


class Sender(Protocol):
    async def send(self, outcome: Outcome) -> None:
        """Send one request, and write to its outcome until it has ended. Cancelling this call
        cancels the request. An error that it raises ends the run.
        """


async def run_load(
    plan: Sequence[PlannedRequest],
    sender: Sender,
    tally: Tally,
    clock: Now,
    stop: asyncio.Event,
    wait_s: float,
) -> float | None:
    """Offer the plan, then wait at most `wait_s` for the requests that still run. A request that
    has not ended by then is cancelled, and counts as unfinished.

    `stop` ends sending and waiting at once. Returns the second at which it ended the sending; None
    if all requests were sent.
    """
    begin_unix_s = clock.unix_s()
    running: set[asyncio.Task[None]] = set()
    mistakes: list[BaseException] = []
    stopped_s: float | None = None

    def finished(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            mistakes.append(error)
            stop.set()

    async def serve(outcome: Outcome, later: Sequence[PlannedRequest]) -> None:
        await sender.send(outcome)
        for planned in later:
            if not outcome.finished or stop.is_set():
                return
            await asyncio.sleep(planned.pause_s)
            outcome = tally.begin(planned, clock.unix_s(), 0.0)
            await sender.send(outcome)

    for planned, *later in rounds(plan):
        await _until(begin_unix_s + planned.arrival_s, clock, stop)
        if stop.is_set():
            stopped_s = clock.unix_s() - begin_unix_s
            break
        sent_unix_s = clock.unix_s()
        outcome = tally.begin(planned, sent_unix_s, sent_unix_s - begin_unix_s - planned.arrival_s)
        task = asyncio.create_task(serve(outcome, later), name=f"load.{planned.number}")
        running.add(task)
        task.add_done_callback(finished)
    await _drained(running, stop, wait_s)
    for outcome in tally.outcomes:
        outcome.end("unfinished")
    left = list(running)
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CLOSING_S)
    if mistakes:
        raise mistakes[0]
    return stopped_s


async def _until(at_unix_s: float, clock: Now, stop: asyncio.Event) -> None:
    """Sleep until that instant, or until `stop`. A request that is due already yields once, so
    that answers are read during a burst.
    """
    await asyncio.sleep(0)
    while (left_s := at_unix_s - clock.unix_s()) > 0 and not stop.is_set():
        try:
            async with asyncio.timeout(left_s):
                await stop.wait()
        except TimeoutError:
            continue


async def _drained(running: set[asyncio.Task[None]], stop: asyncio.Event, wait_s: float) -> None:
    if not running:
        return
    stopped = asyncio.create_task(stop.wait())
    everything = asyncio.create_task(asyncio.wait(set(running)))
    await asyncio.wait([stopped, everything], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    everything.cancel()  # the wait, not what it waits for
