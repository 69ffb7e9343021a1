"""Device family: what a plugin says about the machine before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qiao.contract.markers import hookspec
from qiao.contract.types import Capabilities, DeviceInfo, MemoryInfo, PackedWeight, WeightInfo


class DeviceSpec:
    """Hooks that find and describe devices. All are pure but ``synchronize``, ``capture`` and
    ``set_threads``."""

    @hookspec
    def probe_devices(self) -> list[DeviceInfo]:
        """The devices of this machine, or an empty list. May import the vendor's SDK; must not allocate."""
        raise NotImplementedError

    @hookspec
    def capabilities(self, chip: str) -> Capabilities:
        """What ``chip`` supports, as data, without touching a device. ``""`` is the plugin's usual chip."""
        raise NotImplementedError

    @hookspec
    def memory_info(self, device: str) -> MemoryInfo:
        """Bytes free and in total on the torch device string ``device``."""
        raise NotImplementedError

    @hookspec
    def synchronize(self, device: str) -> None:
        """Wait for all work on ``device``; a late kernel fault raises here."""
        raise NotImplementedError

    @hookspec
    def utilization(self, device: str) -> float:
        """Optional. Busy share of the device, 0 to 1."""
        raise NotImplementedError

    @hookspec
    def capture(self, function: Callable[..., Any], example: tuple[Any, ...], device: str) -> Callable[[], Any]:
        """Optional. Record ``function(*example)`` and return a callable without arguments that does the work again.

        The tensors in ``example`` are fixed input buffers: the caller writes new values into them before each replay. A
        replay reads and writes the same memory as the recording did, and returns the same output tensors, filled anew.
        They are good until the next recording or replay over the same buffers (tensors that share a storage), so what
        is recorded over one set of buffers may share its working memory. ``function`` is run at least once; the caller
        keeps caches and weights alive. The callable may have ``nbytes``, the bytes that it holds alone; the core keeps
        fewer recordings where they hold many.

        Raises ``NotImplementedError``, with a reason for people, where something in ``function`` cannot be recorded: a
        value read on the host, an operator without a kernel of the device. The caller then runs it as it is. In a
        captured region hooks take what changes from step to step from tensors only: ``kv_lens`` cannot be read there,
        and ``plan`` is None.
        """
        raise NotImplementedError

    @hookspec
    def set_threads(self, count: int | None) -> str:
        """Optional. Since 1.1. Use ``count`` threads of the host for this plugin's own host work, None for its default.

        Called once, before anything is computed. Returns what was chosen and why, for the user (``"2 threads (2
        cores)"``); fewer than asked for where the process may not run on as many processors. Raises ``ValueError`` for
        a count below 1.
        """
        raise NotImplementedError

    @hookspec
    def restore_weight(
        self, scheme: str, tensors: Mapping[str, torch.Tensor], info: WeightInfo, device: str
    ) -> PackedWeight:
        """Optional. Since 1.1. The packed weight whose ``data`` once were ``tensors``, for ``Capabilities.packing``.

        They come from a file, mapped into memory: they are not written to, and only pages that are read take memory.
        Raises ``ValueError`` for tensors that this device did not pack.
        """
        raise NotImplementedError

    @hookspec
    def collective_backend(self) -> str:
        """Optional. The ``torch.distributed`` backend for this device, for example ``"gloo"``."""
        raise NotImplementedError
