"""Independent pieces of work over several processes: the same results, in the same places, however
many there are.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from shared.errors import ConfigError

T = TypeVar("T")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_jobs(jobs: int) -> int:
    """The number itself. Raises ConfigError below 1."""
    if jobs < 1:
        raise ConfigError("--jobs must be 1 or more")
    return jobs


def run_all(tasks: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    """(which task, its result), as they end. Tasks and results must be picklable.

    Raises what a task raises. Whatever ends this early (an error, Ctrl-C) ends the other processes
    too; they do not outlive this one.
    """
    if jobs == 1 or len(tasks) == 1:
        yield from ((number, task()) for number, task in enumerate(tasks))
        return
    # Fresh processes: a fork would copy whatever threads hold at that moment.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin) as pool:
        waiting = {pool.submit(task): number for number, task in enumerate(tasks)}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.terminate()
            raise


def _begin() -> None:
    """In each process: Ctrl-C is for the one that started it, and its end is ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
