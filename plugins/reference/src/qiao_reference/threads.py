"""How many threads torch may use: no more than the container's control groups allow, which torch does not look at."""

from __future__ import annotations

import torch
from qiao.contract import hookimpl
from qiao.contract.processors import granted_cpus


@hookimpl
def set_threads(count: int | None) -> str:
    """Torch's threads: ``count``, or torch's own choice (``OMP_NUM_THREADS``, or a thread a core), within the quota."""
    if count is not None and count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    most, wanted = granted_cpus(), torch.get_num_threads() if count is None else count
    torch.set_num_threads(min(wanted, most))
    return f"{min(wanted, most)} torch threads" + (f"; no more than {most} are allowed" if wanted > most else "")
