"""An engine must not outlive its front end, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
"""Number of the Linux prctl that asks for a signal when the parent ends (prctl(2))."""


def end_with_parent(stdin_fd: int) -> None:
    """End this process as soon as its parent ends.

    On Linux the kernel sends SIGKILL. Everywhere a thread waits for the end of ``stdin_fd``, a pipe that only the
    parent holds open, and then leaves without clean-up.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_wait_for_end, args=(stdin_fd,), name="parent-watch", daemon=True).start()


def _wait_for_end(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    os._exit(1)


def ignore_terminal_signals() -> None:
    """Leave SIGINT and SIGTERM to the parent, which drains first and then stops this process.

    A terminal or a service manager sends both signals to the whole process group.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
