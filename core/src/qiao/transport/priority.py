"""Who runs first where the front end and the engine's kernels share processors."""

from __future__ import annotations

import os


def run_when_idle() -> None:
    """For the front end: do not interrupt a thread of the engine that computes; wait until it waits or its time is up.

    An interrupted kernel thread holds a part of the step that all its siblings wait for, so that a token's worth of
    HTTP would stop every core. Linux calls this batch scheduling; elsewhere nothing is done.
    """
    _schedule("SCHED_BATCH")


def run_at_once() -> None:
    """For the engine, whose process inherits the front end's scheduling."""
    _schedule("SCHED_OTHER")


def _schedule(name: str) -> None:
    policy = getattr(os, name, None)
    if policy is not None and os.sched_getscheduler(0) in (os.SCHED_BATCH, os.SCHED_OTHER):
        os.sched_setscheduler(0, policy, os.sched_param(0))
