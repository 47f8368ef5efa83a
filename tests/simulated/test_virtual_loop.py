"""Tests of the event loop on virtual time, and of simulated processes on it: one order of events
for one seed, and processes that stop, return and die.
"""

import asyncio
import contextlib

import pytest

from tests.simulated.process import SimProcess, virtual_loop
from tests.simulated.virtual_loop import run_virtual, virtual


def test_a_run_where_every_task_waits_and_no_timer_is_set_fails_and_names_them():
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait(), name="the-forgotten-one")

    with pytest.raises(
        RuntimeError, match=r"every task waits and no timer is set.*the-forgotten-one"
    ):
        run_virtual(main())


def test_a_task_that_spins_without_time_passing_fails():
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="spin"):
        run_virtual(main())


@virtual(start_s=1e9)
async def test_waiting_for_less_than_a_rounding_error_still_takes_time():
    until_s = asyncio.get_running_loop().time() + 1e-3
    while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(left_s / 2)
    assert until_s == pytest.approx(1e9)


@virtual()
async def test_timers_of_one_instant_run_in_the_order_in_which_they_were_set():
    ran: list[int] = []
    loop = asyncio.get_running_loop()
    for i in range(500):
        loop.call_at(7.0, ran.append, i)
    loop.call_at(6.5, ran.append, -1)
    await asyncio.sleep(8)
    assert ran == [-1, *range(500)]


@virtual()
async def test_cancelled_timers_neither_run_nor_move_time():
    loop = asyncio.get_running_loop()
    for _ in range(2000):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(50):
                await asyncio.sleep(0.001)
    assert loop.time() == pytest.approx(2.0)


def test_an_error_in_a_callback_ends_the_run_with_it():
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 / 0)
        await asyncio.sleep(100)

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())


def test_an_error_in_a_task_nobody_awaited_ends_the_run_with_it():
    async def fail() -> None:
        raise ValueError("forgotten")

    async def main() -> None:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        del task

    with pytest.raises(ValueError, match="forgotten"):
        run_virtual(main())


def test_what_is_left_at_the_end_is_cancelled_and_cleans_up():
    cleaned: list[str] = []

    async def linger(name: str) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(0)
            cleaned.append(name)

    async def main() -> list[asyncio.Task[None]]:
        left = [asyncio.create_task(linger(name)) for name in "abc"]
        await asyncio.sleep(1)
        return left

    left = run_virtual(main())
    assert cleaned == ["a", "b", "c"]
    assert all(task.cancelled() for task in left)


async def ticking(ticks: list[float], period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        ticks.append(asyncio.get_running_loop().time())


@virtual()
async def test_a_paused_process_runs_nothing_and_its_timers_fire_late():
    ticks, others = list[float](), list[float]()
    process = SimProcess("a")
    process.start(ticking(ticks, 1.0))
    SimProcess("b").start(ticking(others, 1.0))
    await asyncio.sleep(2.5)
    process.pause()
    await asyncio.sleep(3.0)
    process.resume()
    await asyncio.sleep(1.75)
    assert ticks == [1.0, 2.0, 5.5, 6.5]
    assert others == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


@virtual()
async def test_what_a_paused_process_missed_comes_in_order():
    seen: list[int] = []
    process = SimProcess("a")
    for i in range(20):
        virtual_loop().call_at(1 + i, seen.append, i, context=process.context())
    process.pause()
    await asyncio.sleep(10.5)
    assert seen == []
    process.resume()
    virtual_loop().call_soon(seen.append, 100, context=process.context())
    await asyncio.sleep(0.1)
    assert seen == [*range(10), 100]


@virtual()
async def test_a_process_may_kill_itself_and_be_started_again_by_its_supervisor():
    starts: list[float] = []

    async def serve(process: SimProcess) -> None:
        starts.append(virtual_loop().time())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(1)
        starts.append(-1)

    def start(_: SimProcess | None = None) -> None:
        process = SimProcess(
            "a", on_exit=lambda ended: virtual_loop().call_later(0.5, start, ended) and None
        )
        process.start(serve(process))

    start()
    await asyncio.sleep(4)
    assert starts == [0.0, 1.5, 3.0]


def test_the_end_of_a_run_is_no_exit_that_a_supervisor_would_answer_with_a_new_start():
    starts: list[float] = []

    async def main() -> None:
        def start(_: SimProcess | None = None) -> None:
            starts.append(virtual_loop().time())
            SimProcess("a", on_exit=start).start(ticking([], 1.0))

        start()
        await asyncio.sleep(3)

    run_virtual(main())
    assert starts == [0.0]


def test_a_main_that_fails_ends_the_run_unless_somebody_supervises_it():
    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError("broken")

    async def alone() -> None:
        SimProcess("a").start(fail())
        await asyncio.sleep(10)

    async def supervised() -> BaseException | None:
        process = SimProcess("a", on_exit=lambda _: None)
        process.start(fail())
        await process.exited.wait()
        return process.failure

    with pytest.raises(ValueError, match="broken"):
        run_virtual(alone())
    assert isinstance(run_virtual(supervised()), ValueError)
