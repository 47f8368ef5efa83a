"""Binds child processes to this one: they end with it, even when it is killed with SIGKILL."""

import os
import sys
from collections.abc import Sequence

# A child runs this first: 1 is PR_SET_PDEATHSIG of <linux/prctl.h>, 9 is SIGKILL. If the parent has
# ended before, the child ends, too. A preexec_fn will not do: it runs between fork and exec, where
# a lock that another thread of the parent held is never released.
BIND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that the kernel kills the child when the thread that started it ends.
    Outside Linux, the command itself.

    So the main thread has to start it: started by another thread, it would end with that thread.
    The wrapper takes 15 ms.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", BIND, str(os.getpid()), *command]
