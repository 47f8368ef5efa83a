"""Runs independent tasks over several processes, with the same results for any number of them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

from shared.errors import ConfigError

T = TypeVar("T")


def check_jobs(jobs: int) -> int:
    """The number itself. Raises ConfigError below 1."""
    if jobs < 1:
        raise ConfigError("--jobs must be 1 or more")
    return jobs


def run_all(tasks: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    """Yield (the index of a task, its result) as tasks end. Tasks and results must be picklable.
    The caller may append tasks while it reads results: they run too.

    Raises what a task raises. An error or Ctrl-C here ends the other processes too; they do not
    outlive this one. While a single task is left at the beginning it runs in this process.
    """
    sent = 0
    while sent < len(tasks) and (jobs == 1 or len(tasks) - sent == 1):
        yield sent, tasks[sent]()
        sent += 1
    if sent == len(tasks):
        return
    # Fresh processes: a fork would copy the locks that threads hold at that moment.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    # The pool starts a process only when there is a task for it.
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin) as pool:
        waiting: dict[Future[T], int] = {}
        try:
            while True:
                while sent < len(tasks):
                    waiting[pool.submit(tasks[sent])] = sent
                    sent += 1
                if not waiting:
                    return
                done = next(as_completed(waiting))
                yield waiting.pop(done), done.result()
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
