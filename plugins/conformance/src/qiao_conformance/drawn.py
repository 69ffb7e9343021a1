"""Cases that hypothesis draws within what a chip declares, so that a failure shrinks to the smallest that shows it.

A recipe holds plain numbers only and prints as the call that makes it; ``build`` turns it into a case. Sizes shrink
towards one, windows and caps towards none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from qiao.contract import Capabilities, PenaltyTensors
from qiao.contract.cases import Case, linear, logits, paged
from qiao.contract.cases.base import Random

MOST_BLOCKS = 3
"""Of one sequence, so that small cases cross the borders of blocks."""


@dataclass(frozen=True)
class Paged:
    """A ragged batch: ``sequences`` of (queries, context); the cache has ``spare`` blocks that nobody uses."""

    dtype: str
    kept: str
    layout: str
    block_size: int
    head_dim: int
    kv_heads: int
    group: int
    sequences: tuple[tuple[int, int], ...]
    window: int
    soft_cap: float
    spare: int
    seed: int

    @property
    def parts(self) -> tuple[paged.Batch, paged.Kind]:
        """The same as records of the fixed cases."""
        queries, contexts = zip(*self.sequences, strict=True)
        heads = self.kv_heads * self.group
        batch = paged.Batch("drawn", queries, contexts, heads, self.kv_heads, self.window, self.soft_cap)
        return batch, paged.Kind(self.dtype, self.kept, self.layout, self.block_size, self.head_dim)


@dataclass(frozen=True)
class Write:
    """``tokens`` new vectors, ``padding`` of which have the slot -1."""

    cache: Paged
    tokens: int
    padding: int


@dataclass(frozen=True)
class Linear:
    """A product of ``tokens`` rows with a weight [rows, groups * group] of ``scheme``."""

    dtype: str
    scheme: str
    tokens: int
    rows: int
    groups: int
    group: int
    options: str
    bias: bool
    seed: int


@dataclass(frozen=True)
class Sampling:
    """``rows`` of (temperature, top_k, top_p, min_p) over ``vocab`` tokens; with ``ties`` many logits are equal."""

    vocab: int
    rows: tuple[tuple[float, int, float, float], ...]
    ties: bool
    seed: int


@dataclass(frozen=True)
class Light:
    """``tokens`` rows of ``size``; heads and pairs matter to rotations only."""

    dtype: str
    tokens: int
    size: int
    heads: int
    pairs: int
    interleaved: bool
    seed: int


Recipe = Paged | Write | Linear | Sampling | Light
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
def _linear(draw: st.DrawFn, facts: Capabilities) -> Linear:
    scheme = draw(_choice(facts.schemes))
    group, groups = draw(st.integers(1, 80)), 1
    if scheme in ("w4a16", "w8a16"):
        group, groups = draw(st.sampled_from((32, 64, 128))), draw(st.integers(1, 3))
    options = {"fp8": ("", "rows"), "w8a16": ("", "zero"), "w4a16": ("", "perm", "symmetric")}.get(scheme, ("",))
    return Linear(
        draw(_choice(facts.dtypes)),
        scheme,
        draw(st.integers(1, 17)),
        draw(st.integers(1, 70)) if scheme == "dense" else 8 * draw(st.integers(1, 8)),
        groups,
        group if scheme in ("dense", "w4a16", "w8a16") else 16 * (1 + group % 16),
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


def recipes(hook: str, facts: Capabilities) -> st.SearchStrategy[Recipe] | None:
    """What to draw for ``hook`` on a chip with ``facts``; None where it has only fixed cases."""
    if hook in ("attention", "decode_attention"):
        return _paged(facts, hook == "decode_attention")
    if hook in ("write_kv", "rope_write_kv"):
        return _write(facts, hook == "rope_write_kv")
    if hook == "matmul":
        return _linear(facts)
    if hook in ("sample", "apply_penalties", "logprobs"):
        return _sampling(facts)
    return _light(facts) if hook in ("rms_norm", "add_rms_norm", "rotary", "silu_mul", "gelu_mul") else None


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
    columns = recipe.groups * recipe.group
    weight = linear.weight(random, recipe.scheme, recipe.rows, columns, recipe.dtype, group, recipe.options)
    bias = random.normal(recipe.rows, dtype=recipe.dtype) if recipe.bias else None
    return recipe.dtype, {
        "x": random.normal(recipe.tokens, columns, dtype=recipe.dtype),
        "weight": weight,
        "bias": bias,
    }


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
