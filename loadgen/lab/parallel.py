"""Independent tasks over several processes. The results do not depend on their number."""

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
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_jobs(jobs: int) -> int:
    """The number itself. Raises ConfigError below 1."""
    if jobs < 1:
        raise ConfigError("--jobs must be 1 or more")
    return jobs


def run_all(tasks: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    """Yield (the index of a task, its result) as tasks end. Tasks and results must be picklable.

    Raises what a task raises. An error or Ctrl-C here ends the other processes too; they do not
    outlive this one.
    """
    if jobs == 1 or len(tasks) == 1:
        yield from ((number, task()) for number, task in enumerate(tasks))
        return
    # Fresh processes: a fork would copy the locks that threads hold at that moment.
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
    """Prepare a process: it ignores Ctrl-C, which its parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
