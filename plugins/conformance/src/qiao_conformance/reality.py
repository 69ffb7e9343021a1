"""The plan of a small model on the device, and what is really called when the model runs.

The model is a Llama of two layers with random weights; it goes through Qiao's own planner, binder and engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import qiao_reference
import torch
from qiao.engine import Engine, EngineConfig
from qiao.engine.request import EngineRequest
from qiao.models import create, describe
from qiao.registry import Backend, FallbackCounters, Plan, Policy, backend_of, bind, confirm, make_plan
from qiao.sampling_params import SamplingParams

from qiao_conformance.target import Target

HIDDEN, FEED, VOCAB, LAYERS, HEADS, KV_HEADS = 64, 128, 96, 2, 4, 2
PROMPTS = (tuple(range(3, 22)), (5, 6, 7), (80, 2, 9, 40, 41))
NEW_TOKENS = 5

USED = frozenset(
    {"write_kv", "attention", "decode_attention", "matmul", "sample", "rms_norm", "add_rms_norm", "rotary"}
    | {"rope_write_kv", "silu_mul", "pack_weight", "allocate_kv"}
)
"""Operators that a run of the model calls where the plan puts them on a plugin, some in place of others."""

REPLACED_BY = {"write_kv": "rope_write_kv", "rotary": "rope_write_kv"}


def config(facts: Any) -> dict[str, Any]:
    """The model's config with a dtype and a head size that the chip has."""
    dim = (facts.head_dims or (16,))[0]
    dtype = "float32" if "float32" in facts.dtypes else facts.dtypes[0]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def weights(settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights of the model, the same each time."""
    random, dim = torch.Generator().manual_seed(11), settings["head_dim"]
    dtype = getattr(torch, settings["torch_dtype"])

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) * columns**-0.5).to(dtype)

    found = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN) * 8, "lm_head.weight": normal(VOCAB, HIDDEN) * 4}
    found["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    shapes = {
        "self_attn.q_proj": (HEADS * dim, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * dim, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * dim, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * dim),
        "mlp.gate_proj": (FEED, HIDDEN),
        "mlp.up_proj": (FEED, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
    return found


def _counted(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    @wraps(function)
    def count(*args: Any) -> Any:
        calls[name] += 1
        return function(*args)

    return count


def _backend(target: Target, calls: Counter[str]) -> Backend:
    hooks = {name: _counted(name, function, calls) for name, function in target.hooks.items()}
    last = backend_of(qiao_reference, "reference")
    alone = target.name == "reference"
    return Backend(target.name, hooks, target.device, target.capabilities, None if alone else last)


def run(settings: Mapping[str, Any], backend: Backend, plan: Plan, *, eager: bool = True) -> list[list[int]]:
    """The greedy tokens of ``PROMPTS`` by Qiao's engine over ``plan``; raises ``AssertionError`` where one fails.

    With ``eager`` false decode steps are recorded where the plan has ``capture``.
    """
    table = bind(plan, backend, FallbackCounters())
    model = create(dict(settings), table, getattr(torch, settings["torch_dtype"]))
    model.load(weights(settings).items())
    sizes = EngineConfig(
        num_blocks=16,
        block_size=plan.block_size,
        vocab_size=VOCAB,
        dtype=getattr(torch, settings["torch_dtype"]),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_num_queued=8,
        enable_prefix_caching=False,
        enforce_eager=eager,
    )
    engine, found = Engine(model, table, sizes), {str(i): list[int]() for i in range(len(PROMPTS))}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(EngineRequest(request_id=str(i), prompt_token_ids=list(prompt), params=params, arrival=0.0))
    while engine.has_work():
        for output in engine.step():
            assert not output.error, f"the engine refused a request: {output.error}"
            found[output.request_id].extend(output.token_ids)
    return list(found.values())


def check_plan(target: Target) -> None:
    """What the plan puts on the plugin is called there, the rest is not, and the start-up probe changes nothing.

    In float32 the tokens are those of the reference plugin. Raises ``AssertionError``.
    """
    settings, calls = config(target.capabilities), Counter[str]()
    shape, policy = describe(settings), Policy.parse("allow")
    backend = _backend(target, calls)
    plan = make_plan(shape, backend, policy)
    held, _ = confirm(plan, backend, FallbackCounters())
    assert not held.failed, f"declared, but the start-up probe failed: {dict(held.failed)}"
    calls.clear()
    tokens = run(settings, backend, plan)
    planned = {p.operator for p in plan.placements if p.place == target.name} & USED
    replaced = {old for old, new in REPLACED_BY.items() if new in planned}
    missed = [name for name in planned - replaced if not calls[name]]
    assert not missed, f"the plan puts {missed} on {target.name}, but a run of the model never called them there"
    strayed = [name for name in USED if calls[name] and name not in planned]
    assert not strayed, f"{strayed} of {target.name} were called although the plan puts them elsewhere"
    if settings["torch_dtype"] == "float32":
        reference = backend_of(qiao_reference, "reference")
        want = run(settings, reference, make_plan(shape, reference, policy))
        assert tokens == want, f"greedy tokens {tokens} differ from the reference plugin's {want}"
