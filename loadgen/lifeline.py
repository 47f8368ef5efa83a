"""Children that do not outlive us, even when we are killed with SIGKILL and can tidy nothing up."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def lifeline() -> Callable[[], None] | None:
    """For Popen's `preexec_fn`: the kernel kills the child when the thread that started it ends. None where only Linux could.

    So it is for the main thread: in another one, children would end with that thread.
    """
    if _libc is None:
        return None
    libc, parent = _libc, os.getpid()

    def bind() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)

    return bind
