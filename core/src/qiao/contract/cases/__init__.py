"""Small arguments for each hook, from which the conformance kit calls a plugin.

A case is host data only. What a plugin keeps in its own form is given loose (``LooseCache``, ``LooseWeight``), and
``place`` makes the plugin's own form of it through the plugin's ``allocate_kv``, ``write_kv`` and ``pack_weight``.
Slots that a case does not write hold whatever the plugin's allocation left there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from qiao.contract.cases import light, linear, logits, paged
from qiao.contract.cases.base import Case, LooseCache, LooseWeight, Made, Random, place
from qiao.contract.types import Capabilities

__all__ = ["Case", "LooseCache", "LooseWeight", "Random", "cases", "place", "smallest"]

_MAKERS: Mapping[str, Callable[[Capabilities, Random], Made]] = MappingProxyType(
    {
        "allocate_kv": paged.allocate_kv,
        "copy_blocks": paged.copy_blocks,
        "swap_blocks": paged.swap_blocks,
        "write_kv": paged.write_kv,
        "attention": paged.attention,
        "decode_attention": paged.decode_attention,
        "matmul": linear.matmul,
        "sample": logits.sample,
        "apply_penalties": logits.apply_penalties,
        "logprobs": logits.logprobs,
        "rms_norm": light.rms_norm,
        "add_rms_norm": light.add_rms_norm,
        "rotary": light.rotary,
        "silu_mul": light.gated,
        "gelu_mul": light.gated,
        "expert_matmul": linear.expert_matmul,
        "route_experts": light.route_experts,
        "combine_experts": light.combine_experts,
        "cap_logits": light.cap_logits,
        "rope_write_kv": light.rope_write_kv,
    }
)


def cases(name: str, capabilities: Capabilities, seed: int = 0) -> Iterator[Case]:
    """The cases of hook ``name`` that a chip with ``capabilities`` has to pass, the smallest first.

    Hooks that only describe a device have none; ``pack_weight`` and ``prepare_attention`` are tried through ``matmul``
    and ``attention``. The same ``seed`` gives the same numbers.
    """
    maker = _MAKERS.get(name)
    if maker is not None:
        for label, dtype, arguments, note in maker(capabilities, Random(name, seed)):
            yield Case(name, f"{name}-{label}-{dtype}", dtype, arguments, note)


def smallest(name: str, capabilities: Capabilities) -> Case | None:
    """The first case of hook ``name``, None where it has none."""
    return next(cases(name, capabilities), None)
