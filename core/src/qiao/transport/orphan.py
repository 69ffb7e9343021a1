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


def end_signals() -> tuple[signal.Signals, ...]:
    """What asks a server to end: SIGTERM, SIGINT, and SIGHUP, which a terminal sends as it closes.

    The last only where nobody has decided otherwise: ``nohup`` ignores it, and servers with keys read them again.
    """
    asked = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        asked.append(signal.SIGHUP)
    return tuple(asked)


def ignore_terminal_signals() -> None:
    """Leave SIGINT, SIGTERM and SIGHUP to the parent, which drains first and then stops this process.

    A terminal or a service manager sends them to the whole process group.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
