"""Where turns run: on one engine thread beside the event loop, or, in virtual time, at once and then slept."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Protocol

from services.worker.engine import Engine
from services.worker.speaker import Speaker
from services.worker.turn import take_turn
from shared.policy.turn import Ran, Turn
from shared.vocabulary import Slot


class Runner(Protocol):
    async def run(self, engine: Engine, speaker: Speaker, turn: Turn) -> Ran:
        """Take the turn."""

    async def reset(self, engine: Engine) -> None:
        """Forget every slot, after whatever still runs."""

    def close(self) -> None: ...


class ThreadRunner:
    """The live one. The loop stays free while the engine works."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def run(self, engine: Engine, speaker: Speaker, turn: Turn) -> Ran:
        """Returns to the loop's other work once the engine thread has begun: else that thread waits for the interpreter until the loop rests."""
        waits = Lock()
        waits.acquire()
        ran = asyncio.get_running_loop().run_in_executor(self._pool, _begin, waits, engine, speaker, turn)
        waits.acquire()  # some 50 us; only ever with an engine thread that is at rest
        return await ran

    async def reset(self, engine: Engine) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, _reset, engine)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)  # whoever closes the engine next must find it at rest


class VirtualRunner:
    """For a loop whose time is virtual: the engine answers at once how long it takes, and that time passes."""

    async def run(self, engine: Engine, speaker: Speaker, turn: Turn) -> Ran:
        ran = take_turn(engine, speaker, turn)
        await asyncio.sleep(ran.exec_s)
        return ran

    async def reset(self, engine: Engine) -> None:
        _reset(engine)

    def close(self) -> None:
        pass


def _begin(waits: Lock, engine: Engine, speaker: Speaker, turn: Turn) -> Ran:
    waits.release()
    return take_turn(engine, speaker, turn)


def _reset(engine: Engine) -> None:
    for slot in engine.snapshot().slots:
        engine.release(Slot(slot))
