"""Tests of an engine in a child process: it makes the same tokens, and ends with its worker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

pytest.importorskip("torch")

from services.worker.config import WorkerConfig
from services.worker.engine_process import EngineProcess, Watchdog, engine_process
from services.worker.engines.make import make
from services.worker.runner import Runner
from services.worker.step_runner import StepRunner
from shared.core.worker.step import Load, Ran, Step, Work
from shared.errors import ConfigError, EngineError
from shared.schemas import Resume, Sampling
from shared.vocabulary import FinishReason
from tests.fleet.processes import children_of, gone, wait_for
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import virtual

TORCH = WorkerConfig(engine="torch", profile_s=0.0, kv_blocks=64, max_slots=8)
WITHIN_S = 300.0  # the longest that a busy machine may take for anything
SEED = 5
on_one_loop = pytest.mark.asyncio(loop_scope="module")

BEGIN = """
import asyncio, sys
from services.worker.config import WorkerConfig
from services.worker.engine_process import engine_process

async def main():
    cfg = WorkerConfig(engine="torch", profile_s=float(sys.argv[1]))
    async with engine_process(cfg, asyncio.Event()):
        print("ready", flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


def turns(prompts: Sequence[list[int]], outputs: int) -> list[Step]:
    """A turn that prefills all prompts, then `outputs` turns that decode each; the sampling has a
    seed, a stop string and log-probabilities.
    """
    asked = Sampling(temperature=0.8, top_p=0.9, stop=["zzzz"], logprobs=2, max_tokens=outputs + 1)
    loads = [Load(n, prompt, 0, asked, 100 + n, "", Resume()) for n, prompt in enumerate(prompts)]

    def work(slot: int, tokens: int) -> Work:
        return Work(slot, tokens, True, outputs + 1, FinishReason.LENGTH, frozenset({0}))

    first = Step(
        None, [], [], loads, [work(n, len(prompt)) for n, prompt in enumerate(prompts)], None, []
    )
    return [
        first,
        *(
            Step(None, [], [], [], [work(n, 1) for n in range(len(prompts))], None, [])
            for _ in range(outputs)
        ),
    ]


async def run_all(runner: Runner, asked: Sequence[Step]) -> list[list[tuple[Any, ...]]]:
    return [[tuple(one) for one in plain(await runner.run(step)).done] for step in asked]


def plain(ran: Ran) -> Ran:
    return ran._replace(
        done=[
            one._replace(tokens=list(one.tokens), logprobs=list(one.logprobs)) for one in ran.done
        ]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EngineProcess]:
    """One engine for the tests that leave it alive."""
    async with engine_process(TORCH, asyncio.Event()) as engine:
        assert engine is not None
        yield engine
        pid = engine.pid
    assert gone(pid)


@on_one_loop
async def test_an_engine_of_its_own_process_makes_the_same_tokens_and_forgets_after_a_reset(
    engine: EngineProcess,
) -> None:
    rng = Random(SEED)
    asked = turns(
        [[rng.randint(1, 200) for _ in range(length)] for length in (3, 17, 60)], outputs=12
    )
    here = StepRunner(*make(TORCH))
    expected = await run_all(VirtualRunner(here), asked)
    assert engine.facts == here.engine.facts
    await engine.reset()
    assert await run_all(engine, asked) == expected, f"seed {SEED}"
    await engine.reset()
    again = await run_all(engine, asked)
    assert again == expected, "the same slots again, and no prompt is known"


@on_one_loop
async def test_a_turn_larger_than_the_socket_takes_at_once_arrives_whole(
    engine: EngineProcess,
) -> None:
    asked = turns([[5, 6, 7]], outputs=3)
    await engine.reset()
    expected = await run_all(engine, asked)
    await engine.reset()
    # 3 MB each
    large = [step._replace(skipped=list(range(100_000, 700_000))) for step in asked]
    assert await run_all(engine, large) == expected


@on_one_loop
async def test_a_turn_that_was_given_up_on_does_not_answer_for_the_next(
    engine: EngineProcess,
) -> None:
    rng = Random(SEED)
    long, asked = (
        turns([[rng.randint(1, 200) for _ in range(900)]], outputs=0),
        turns([[9, 8, 7]], outputs=3),
    )
    await engine.reset()
    expected = await run_all(engine, asked)
    await engine.reset()
    asking = asyncio.create_task(engine.run(long[0]))
    await asyncio.sleep(0)  # it is sent, and no answer can have been read
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await engine.reset()
    assert await run_all(engine, asked) == expected


@pytest.mark.slow
async def test_an_engine_that_cannot_be_is_refused_with_its_own_words() -> None:
    with pytest.raises(ConfigError, match="float7"):
        async with engine_process(WorkerConfig(engine="torch", dtype="float7"), asyncio.Event()):
            pass


async def test_a_turn_for_a_killed_engine_raises_how_the_engine_ended() -> None:
    (step,) = turns([[5, 6, 7]], outputs=0)
    async with engine_process(TORCH, asyncio.Event()) as engine:
        assert engine is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.run(step)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_ended_and_its_worker_told_the_cause() -> None:
    """SIGSTOP stands for a computation without an end."""
    (step,) = turns([[5, 6, 7]], outputs=0)
    async with engine_process(replace(TORCH, silent_s=0.5), asyncio.Event()) as engine:
        assert engine is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="gave no answer") as raised:
            await engine.run(step)
        assert raised.value.in_turn


@virtual()
async def test_the_watchdog_counts_what_was_asked_and_beats_alone() -> None:
    """An engine may be idle for ever, may take 20 times its prediction, and is given the time that
    its worker was stopped.
    """
    now_s, ended = asyncio.get_running_loop().time, list[float]()
    watchdog = Watchdog(30.0, lambda: ended.append(now_s()))
    await asyncio.sleep(1000.0)
    for predicted_s in (0.1, 10.0):
        watchdog.asked(predicted_s)
        await asyncio.sleep(20 * predicted_s + 27.0 if predicted_s < 1.0 else 199.0)
        watchdog.answered()
    assert ended == []
    asked_s = now_s()
    watchdog.asked(0.1)
    await asyncio.sleep(100.0)
    (ended_s,) = ended
    assert 30.0 <= ended_s - asked_s <= 32.0


@pytest.mark.slow
async def test_a_stop_while_the_engine_loads_ends_it_at_once() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    async with asyncio.timeout(WITHIN_S):  # the measurement is not waited for
        async with engine_process(WorkerConfig(engine="torch", profile_s=3600.0), stop) as engine:
            assert engine is None


@pytest.mark.slow
@pytest.mark.parametrize("ready", [True, False], ids=["ready", "measuring"])
def test_no_engine_outlives_a_worker_that_was_killed(ready: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN, "0.0" if ready else "3600.0"], stdout=subprocess.PIPE
    ) as worker:
        name = "services.worker.engine_process"
        wait_for(lambda: len(children_of(worker.pid, name)) == 1, WITHIN_S)
        (engine,) = children_of(worker.pid, name)
        assert worker.stdout is not None
        # what the engine logs as it begins to measure comes here, too
        said = worker.stdout.readline()
        assert (b"ready" if ready else b"profile.measuring") in said
        worker.kill()
        wait_for(lambda: gone(engine), WITHIN_S)
