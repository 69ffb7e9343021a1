"""The names by which core and plugins find each other."""

from __future__ import annotations

import pluggy

PROJECT = "qiao"
"""The pluggy project name of every hook."""

GROUP = "qiao.v1"
"""The entry-point group. It carries the major version, so a mismatch is known without an import."""

GROUP_PREFIX = "qiao.v"
"""Any other group that starts so belongs to another major version and is reported, never imported."""

CONTRACT_VERSION = (1, 0)
"""Major and minor. A new hook or a new trailing argument raises the minor."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
