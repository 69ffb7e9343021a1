"""The LoRA adapters that requests may use: loaded, counted, and gone when the last request has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from qiao.config import EngineArgs
from qiao.engine.scheduler import Step
from qiao.engine.sequence import Adapter, Sequence
from qiao.errors import ParameterError
from qiao.loading.lora import LoraFile, read_adapter
from qiao.lora.request import LoRARequest, parse_modules
from qiao.models.adapters import ModelAdapters
from qiao.models.base import Model
from qiao.optable import OpTable

NOT_ENABLED = "LoRA adapters are not enabled; start with --enable-lora, or LLM(..., enable_lora=True)"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loaded:
    request: LoRARequest
    adapter: Adapter
    users: int = 0
    leaving: bool = False


class AdapterPool:
    """Adapters by their number. ``read`` reads and checks a path. Same thread rules as the engine.

    One that is removed while requests use it takes no new ones and stays until they have ended.
    """

    def __init__(self, model: ModelAdapters, read: Callable[[str], LoraFile]) -> None:
        self._model, self._read = model, read
        self._loaded: dict[int, _Loaded] = {}

    def read(self, request: LoRARequest) -> LoraFile | None:
        """The files of an adapter, for ``add``; None for one that is loaded. Any thread may do this.

        Raises ``ModelError``.
        """
        known = self._loaded.get(request.lora_int_id)
        if known is not None and known.request == request:
            return None
        return self._read(request.lora_path)

    def add(self, request: LoRARequest, file: LoraFile | None = None) -> None:
        """Load an adapter, from ``file`` where it has been read; the same one again changes nothing.

        Raises ``ParameterError`` where its number means another one, ``ModelError`` for bad files.
        """
        number = request.lora_int_id
        known = self._loaded.get(number)
        if known is not None:
            if known.leaving or known.request != request:
                raise ParameterError(
                    "lora_int_id",
                    f"{number} is the adapter {known.request.lora_name!r} of {known.request.lora_path}; give each "
                    "adapter a number of its own",
                )
            return
        start = time.monotonic()
        file = file or self._read(request.lora_path)
        size = self._model.load(number, file)
        self._loaded[number] = _Loaded(request, Adapter(number, request.lora_name, file.digest))
        logger.info(
            "adapter %s (rank %d, %.1f MB) loaded in %.2f s",
            request.lora_name,
            file.rank,
            size / 1e6,
            time.monotonic() - start,
        )

    def remove(self, number: int) -> bool:
        """Let an adapter go, at once or with its last request; False where there is none."""
        known = self._loaded.get(number)
        if known is None or known.leaving:
            return False
        known.leaving = True
        self._forget_unused(known)
        return True

    def find(self, number: int) -> Adapter:
        """The adapter for a new request. Raises ``ParameterError`` where it is not loaded."""
        known = self._loaded.get(number)
        if known is None or known.leaving:
            raise ParameterError("model", "names an adapter that is not loaded any more; load it again")
        return known.adapter

    def enter(self, adapter: Adapter) -> None:
        """A request begins."""
        self._loaded[adapter.number].users += 1

    def leave(self, adapter: Adapter) -> None:
        """A request has ended."""
        known = self._loaded[adapter.number]
        known.users -= 1
        self._forget_unused(known)

    def _forget_unused(self, known: _Loaded) -> None:
        if known.leaving and not known.users:
            self._model.drop(known.adapter.number)
            del self._loaded[known.adapter.number]

    def choose(self, step: Step) -> None:
        """Make the layers use the adapters of ``step``'s sequences."""
        self._model.choose([number_of(seq) for seq in step.seqs], step.counts)

    def clear(self) -> None:
        """No adapter, until the next ``choose``."""
        self._model.rows.clear()


def number_of(seq: Sequence) -> int:
    """The adapter's number, 0 for none."""
    adapter = seq.request.adapter
    return 0 if adapter is None else adapter.number


def names_of(seqs: Iterable[Sequence]) -> list[str]:
    """The adapters that ``seqs`` use, sorted."""
    return sorted({seq.request.adapter.name for seq in seqs if seq.request.adapter is not None})


def load_adapters(args: EngineArgs, model: Model, ops: OpTable) -> AdapterPool | None:
    """The LoRA adapters from the start, and room for more; None where they are not enabled.

    Raises ``ModelError`` for bad files, and for a model that takes no adapters.
    """
    if not args.enable_lora:
        return None
    read = partial(read_adapter, max_rank=args.max_lora_rank, download_dir=args.download_dir)
    pool = AdapterPool(ModelAdapters(model, ops), read)
    for one in parse_modules(args.lora_modules):
        pool.add(one)
    return pool
