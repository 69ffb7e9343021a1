"""Made-up results of the comparison."""

from __future__ import annotations

from typing import Any


def run(peer: str, cell: str, size: str = "135m", number: int = 0, **figures: Any) -> dict[str, Any]:
    """One round of one server in one cell; rates and times that are not given are None."""
    form = "4bit" if peer.split(" ")[1] in ("4", "int4", "Q4_0", "GPTQ") else "16bit"
    keys = ("output_rate", "full_rate", "decode_rate", "prefill_rate", "tpot_ms", "ttft_mean_ms", "ttft_p95_ms")
    filled = dict.fromkeys(keys) | {"pss_mib": 100.0, "requests": [], "errors": [], "failed": 0, "other_length": 0}
    return filled | {"peer": peer, "cell": cell, "size": size, "format": form, "round": number} | figures


def request(ttft_ms: float | None, error: str | None = None) -> dict[str, Any]:
    """One request of a run."""
    return {"ttft_ms": ttft_ms, "tpot_ms": None, "seconds": 1.0, "error": error}


def results(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A whole JSON file."""
    return {
        "date": "2026-11-30",
        "minutes": 1.0,
        "command": "python benchmarks/peers.py run",
        "rounds": 3,
        "machine": {"processor": "a processor", "flags": ["avx2"], "cores": 2, "memory_gib": 23.5},
        "versions": {"qiao": "commit 1"},
        "peaks": {"memory_gb_s": 30.0, "fp32_gop_s": 150.0, "int8_gop_s": 300.0, "int8_instructions": "one"},
        "starts": [],
        "skipped": [],
        "runs": list(runs),
        **more,
    }
