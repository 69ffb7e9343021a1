"""What ``qiao doctor`` runs in a process of its own: import torch and plugins, probe, choose, plan.

A vendor's SDK may crash or hang the process that imports it; then the doctor must live to tell. Run as
``python -m qiao.cli.doctor_child RESULT_FILE [--plugin NAME]``; the result is JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALL_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""The config of SmolLM2-135M, which the quickstart serves: the model that the doctor plans for."""


def torch_facts() -> dict[str, Any]:
    """Version, build and thread count of the installed torch; ``error`` where it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken install raises more than ImportError
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def plugin_facts(only: str | None) -> list[dict[str, Any]]:
    """Each plugin loaded and probed: its record, its devices, its verdict."""
    from qiao.registry import Discovery, allowed_plugins, discover, survey

    discovery = discover(allowed_plugins(os.environ))
    records = tuple(r for r in discovery.records if only is None or r.name == only)
    return [
        {
            "name": item.record.name,
            "distribution": item.record.distribution,
            "version": item.record.version,
            "status": item.record.status,
            "verdict": item.verdict,
            "hooks": len(item.record.hooks),
            "devices": [
                {"name": d.name, "torch_device": d.torch_device, "score": d.score, "evidence": d.evidence}
                for d in item.devices
            ],
        }
        for item in survey(Discovery(records, discovery.core_version))
    ]


def device_facts() -> dict[str, Any]:
    """What ``--device auto`` takes, and where the small model's operators would run; ``error`` where nothing does."""
    from qiao.errors import QiaoError
    from qiao.models.placing import shape_for
    from qiao.registry import Policy, choose, make_plan

    try:
        backend = choose("auto")
        shape = shape_for(SMALL_MODEL, "auto", backend.capabilities)
        plan = make_plan(shape, backend, Policy.parse("warn", None))
    except QiaoError as error:
        return {"error": str(error)}
    return {
        "name": plan.device,
        "plugin": plan.plugin,
        "host": plan.host,
        "evidence": backend.device.evidence,
        "sdk": dict(backend.capabilities.sdk),
        "plan": plan.as_dict(),
        "fallback": [{"operator": r.operator, "reason": r.reason} for r in plan.fallback_rows],
    }


def main(arguments: Sequence[str]) -> None:
    """Write the result file."""
    target = Path(arguments[0])
    only = arguments[2] if len(arguments) > 2 and arguments[1] == "--plugin" else None
    result: dict[str, Any] = {"torch": torch_facts()}
    if "error" not in result["torch"]:
        result["plugins"] = plugin_facts(only)
        if only is None:
            result["device"] = device_facts()
    target.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
