"""Cases that hypothesis draws within what a chip declares, so that a failure shrinks to the smallest that shows it.

A recipe holds plain numbers only and prints as the call that makes it; ``build`` turns it into a case. Sizes shrink
towards one, windows and caps towards none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from qiao.contract import Capabilities, PenaltyTensors
from qiao.contract.cases import Case, linear, logits, paged
from qiao.contract.cases.base import Random

from qiao_conformance.recipes import Capped, Experts, Light, Linear, Paged, Recipe, Routed, Sampling, Write

MOST_BLOCKS = 3
"""Of one sequence, so that small cases cross the borders of blocks."""


_SEED = st.integers(0, 999)


def _choice(names: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(names)


@st.composite
def _paged(draw: st.DrawFn, facts: Capabilities, decode_only: bool = False) -> Paged:
    block = draw(_choice(facts.block_sizes or (4, 16, 5, 1)))
    layouts = tuple(x for x in facts.kv_layouts if x in ("NHD", "HND")) or facts.kv_layouts
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.integers(1, MOST_BLOCKS * min(block, 32)))
        edge = draw(st.sampled_from((0, 0, block, 2 * block, block + 1)))  # full blocks and just begun ones
        context = edge or context
        sequences.append((1 if decode_only else draw(st.integers(1, min(context, 9))), context))
    return Paged(
        draw(_choice(facts.dtypes)),
        draw(_choice(facts.kv_dtypes or facts.dtypes)),
        draw(_choice(layouts)),
        block,
        draw(_choice(facts.head_dims or (16, 64, 80, 24))),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 8)),
        tuple(sequences),
        draw(st.integers(0, 40)) if facts.sliding_window else 0,
        draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))) if facts.soft_cap else 0.0,
        draw(st.integers(1, 6)),
        draw(_SEED),
    )


@st.composite
def _write(draw: st.DrawFn, facts: Capabilities, own: bool = False) -> Write:
    cache = draw(_paged(facts))
    if own:  # a rotated key that is rounded once more may end on either side
        cache = Paged(**{**vars(cache), "kept": cache.dtype})
    slots = paged_slots(cache)
    tokens = draw(st.integers(1, min(slots, 9)))
    return Write(cache, tokens, draw(st.integers(0, tokens)))


def paged_slots(recipe: Paged) -> int:
    """Slots of the recipe's cache."""
    blocks = sum(-(-context // recipe.block_size) for _, context in recipe.sequences)
    return (blocks + recipe.spare) * recipe.block_size


@st.composite
def _linear(draw: st.DrawFn, facts: Capabilities, for_experts: bool = False) -> Linear:
    scheme = draw(_choice(facts.schemes))
    group, groups = draw(st.integers(1, 80)), 1
    if scheme in ("w4a16", "w8a16"):
        group, groups = draw(st.sampled_from((32, 64, 128))), draw(st.integers(1, 3))
    options = {"fp8": ("", "rows"), "w8a16": ("", "zero", "perm"), "w4a16": ("", "symmetric", "perm")}.get(
        scheme, ("",)
    )
    options = tuple(x for x in options if x != "perm") if for_experts else options
    short = draw(st.sampled_from((0, 0, 0, 8, 1, 31))) if groups > 1 else 0
    return Linear(
        draw(_choice(facts.dtypes)),
        scheme,
        draw(st.integers(1, 17)),
        draw(st.integers(1, 70)) if scheme == "dense" else draw(st.sampled_from((8, 1))) * draw(st.integers(1, 8)),
        groups,
        group if scheme in ("dense", "w4a16", "w8a16") else draw(st.sampled_from((16, 1))) * (1 + group % 16),
        short,
        draw(_choice(options)),
        draw(st.booleans()),
        draw(_SEED),
    )


@st.composite
def _sampling(draw: st.DrawFn, facts: Capabilities) -> Sampling:
    row = st.tuples(
        st.sampled_from((0.0, 0.5, 1.0, 1.7)),
        st.integers(0, 40),
        st.sampled_from((1.0, 0.3, 0.5, 0.8, 0.95)),
        st.sampled_from((0.0, 0.05, 0.3)),
    )
    rows = tuple(draw(st.lists(row, min_size=1, max_size=5)))
    return Sampling(draw(st.integers(1, 300)), rows, draw(st.booleans()), draw(_SEED))


@st.composite
def _light(draw: st.DrawFn, facts: Capabilities) -> Light:
    size = draw(st.integers(1, 70))
    dim = 2 * draw(st.integers(1, 40)) if not facts.head_dims else draw(_choice(facts.head_dims))
    pairs = draw(st.integers(1, dim // 2))
    return Light(
        draw(_choice(facts.dtypes)),
        draw(st.integers(1, 9)),
        dim if draw(st.booleans()) else size,
        draw(st.integers(1, 4)),
        pairs,
        draw(st.booleans()),
        draw(_SEED),
    )


@st.composite
def _experts(draw: st.DrawFn, facts: Capabilities) -> Experts:
    count = draw(st.integers(1, 6))
    choice = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))
    return Experts(draw(_linear(facts, for_experts=True)), count, tuple(choice))


@st.composite
def _routed(draw: st.DrawFn, facts: Capabilities) -> Routed:
    experts = draw(st.integers(1, 64))
    return Routed(
        draw(_choice(facts.dtypes)),
        draw(st.integers(1, 9)),
        experts,
        draw(st.integers(1, min(experts, 8))),
        draw(st.integers(1, 70)),
        draw(st.booleans()),
        draw(_SEED),
    )


@st.composite
def _capped(draw: st.DrawFn, facts: Capabilities) -> Capped:
    cap = draw(st.sampled_from((1.0, 2.5, 30.0, 50.0)))
    return Capped(draw(st.integers(1, 5)), draw(st.integers(1, 300)), cap, draw(_SEED))


_LIGHT = ("rms_norm", "add_rms_norm", "rotary", "silu_mul", "gelu_mul")
_STRATEGIES: Mapping[str, Callable[[Capabilities], st.SearchStrategy[Recipe]]] = MappingProxyType(
    {
        "attention": _paged,
        "decode_attention": lambda facts: _paged(facts, True),
        "write_kv": _write,
        "rope_write_kv": lambda facts: _write(facts, True),
        "matmul": _linear,
        "expert_matmul": _experts,
        "route_experts": _routed,
        "combine_experts": _routed,
        "cap_logits": _capped,
        **dict.fromkeys(("sample", "apply_penalties", "logprobs"), _sampling),
        **dict.fromkeys(_LIGHT, _light),
    }
)


def recipes(hook: str, facts: Capabilities) -> st.SearchStrategy[Recipe] | None:
    """What to draw for ``hook`` on a chip with ``facts``; None where it has only fixed cases."""
    make = _STRATEGIES.get(hook)
    return None if make is None else make(facts)


def build(hook: str, recipe: Any) -> Case:
    """The case of ``hook`` that ``recipe`` describes."""
    random = Random(hook, recipe.cache.seed if isinstance(recipe, Write) else recipe.seed)
    dtype, arguments = _MAKERS[hook](random, recipe)
    return Case(hook, f"{hook}-drawn", dtype, arguments, repr(recipe))


Made = tuple[str, dict[str, Any]]


def _attention(random: Random, recipe: Paged) -> Made:
    batch, kind = recipe.parts
    return recipe.dtype, paged.attention_arguments(random, batch, kind, recipe.spare)


def _written(random: Random, recipe: Write) -> Made:
    batch, kind = recipe.cache.parts
    cache, _ = paged.paged(random, batch, kind, recipe.cache.spare)
    cache = cache if kind.layout in ("NHD", "HND") else paged.filled(random, cache, kind.dtype)
    slots = random.order(paged_slots(recipe.cache))[: recipe.tokens]
    slots[random.order(recipe.tokens)[: recipe.padding]] = -1
    shape = (recipe.tokens, *cache.key.shape[1:])
    key, value = (random.normal(*shape, dtype=kind.dtype) for _ in range(2))
    return kind.dtype, {"key": key, "value": value, "cache": cache, "slot_mapping": slots}


def _rotated_and_written(random: Random, recipe: Write) -> Made:
    dtype, stored = _written(random, recipe)
    tokens, heads, dim = stored["key"].shape
    angle = random.uniform(tokens, dim // 2) * 6.28
    query = random.normal(tokens, heads * recipe.cache.group, dim, dtype=dtype)
    arguments = {"query": query, "key": stored["key"], "value": stored["value"], "cos": angle.cos()}
    arguments |= {"sin": angle.sin(), "interleaved": False}
    return dtype, {**arguments, "cache": stored["cache"], "slot_mapping": stored["slot_mapping"]}


def _product(random: Random, recipe: Linear) -> Made:
    group = recipe.group if recipe.groups > 1 else -1
    weight = linear.weight(random, recipe.scheme, recipe.rows, recipe.columns, recipe.dtype, group, recipe.options)
    bias = random.normal(recipe.rows, dtype=recipe.dtype) if recipe.bias else None
    return recipe.dtype, {
        "x": random.normal(recipe.tokens, recipe.columns, dtype=recipe.dtype),
        "weight": weight,
        "bias": bias,
    }


def _expert_product(random: Random, recipe: Experts) -> Made:
    each = recipe.weight
    made = [_product(random, each)[1] for _ in range(recipe.count)]
    x = random.normal(len(recipe.choice), each.columns, dtype=each.dtype)
    weights = tuple(one["weight"] for one in made)
    return each.dtype, {"x": x, "weights": weights, "experts": torch.tensor(recipe.choice)}


def _routing(random: Random, recipe: Routed) -> Made:
    """No two logits of a row are equal, so that the choice is one."""
    steps = torch.stack([random.order(recipe.experts) for _ in range(recipe.tokens)]) - recipe.experts // 2
    logits = (steps / 8).to(getattr(torch, recipe.dtype))
    return recipe.dtype, {"logits": logits, "top_k": recipe.top_k, "normalise": recipe.normalise}


def _combined(random: Random, recipe: Routed) -> Made:
    x = random.normal(recipe.tokens, recipe.top_k, recipe.size, dtype=recipe.dtype)
    weights = random.uniform(recipe.tokens, recipe.top_k) / recipe.top_k
    return recipe.dtype, {"x": x, "weights": weights.to(x.dtype)}


def _beyond_cap(random: Random, recipe: Capped) -> Made:
    return "float32", {"logits": random.normal(recipe.rows, recipe.vocab) * 2 * recipe.cap, "cap": recipe.cap}


def _scores(random: Random, recipe: Sampling) -> torch.Tensor:
    found = random.normal(len(recipe.rows), recipe.vocab) * 3
    return found.round() if recipe.ties else found


def _sample(random: Random, recipe: Sampling) -> Made:
    params = logits.settings(list(recipe.rows), random.uniform(len(recipe.rows)))
    return "float32", {"logits": _scores(random, recipe), "params": params}


def _penalties(random: Random, recipe: Sampling) -> Made:
    rows, vocab = len(recipe.rows), recipe.vocab
    prompt, output = (random.whole(0, vocab + 1, rows, n) for n in (1 + vocab % 7, 1 + vocab % 5))
    weights = (random.uniform(rows) - 0.5, random.uniform(rows) - 0.5, random.uniform(rows) + 0.5)
    return "float32", {"logits": _scores(random, recipe), "params": PenaltyTensors(prompt, output, *weights)}


def _logprobs(random: Random, recipe: Sampling) -> Made:
    rows, vocab = len(recipe.rows), recipe.vocab
    ids = random.whole(0, vocab, rows)
    return "float32", {"logits": random.normal(rows, vocab) * 3, "token_ids": ids, "top": min(vocab, rows)}


def _normed(random: Random, recipe: Light, names: tuple[str, ...] = ("x",)) -> Made:
    arguments: dict[str, Any] = {n: random.normal(recipe.tokens, recipe.size, dtype=recipe.dtype) for n in names}
    arguments["weight"] = random.normal(recipe.size, dtype=recipe.dtype)
    return recipe.dtype, {**arguments, "eps": 1e-5}


def _gated(random: Random, recipe: Light) -> Made:
    return recipe.dtype, {"x": random.normal(recipe.tokens, 2 * recipe.size, dtype=recipe.dtype)}


def _rotated(random: Random, recipe: Light) -> Made:
    dim = max(recipe.size + recipe.size % 2, 2 * recipe.pairs)
    query, key = (random.normal(recipe.tokens, n, dim, dtype=recipe.dtype) for n in (recipe.heads * 2, recipe.heads))
    angle = random.uniform(recipe.tokens, recipe.pairs) * 6.28
    arguments = {"query": query, "key": key, "cos": angle.cos(), "sin": angle.sin()}
    return recipe.dtype, {**arguments, "interleaved": recipe.interleaved}


_MAKERS: Mapping[str, Callable[[Random, Any], Made]] = MappingProxyType(
    {
        "attention": _attention,
        "decode_attention": _attention,
        "write_kv": _written,
        "rope_write_kv": _rotated_and_written,
        "matmul": _product,
        "expert_matmul": _expert_product,
        "route_experts": _routing,
        "combine_experts": _combined,
        "cap_logits": _beyond_cap,
        "sample": _sample,
        "apply_penalties": _penalties,
        "logprobs": _logprobs,
        "rms_norm": _normed,
        "add_rms_norm": lambda random, recipe: _normed(random, recipe, ("x", "residual")),
        "rotary": _rotated,
        "silu_mul": _gated,
        "gelu_mul": _gated,
    }
)
