"""Children that do not outlive us, even when we are killed with SIGKILL and can tidy nothing up."""

import os
import sys
from collections.abc import Sequence

# What a child runs first: 1 is PR_SET_PDEATHSIG of <linux/prctl.h>, 9 SIGKILL. If we ended before
# it could ask, so does it. Not a preexec_fn: that runs between fork and exec, where a lock that one
# of our other threads held is never given back.
BIND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(command: Sequence[str]) -> list[str]:
    """The command, as a child whom the kernel kills when the thread that started it ends. Unchanged
    where only Linux could.

    So it is to be started by the main thread: in another one, children would end with that thread.
    Takes 15 ms.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", BIND, str(os.getpid()), *command]
