"""The names by which core and plugins find each other."""

from __future__ import annotations

import pluggy

from qiao.devices import GROUP, GROUP_PREFIX

__all__ = ["CONTRACT_VERSION", "GROUP", "GROUP_PREFIX", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "qiao"
"""The pluggy project name of every hook."""

CONTRACT_VERSION = (1, 1)
"""Major and minor. A new hook or a new trailing argument raises the minor."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
