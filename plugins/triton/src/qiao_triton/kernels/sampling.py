"""Sampling without a sort, and penalties.

Every filter keeps a prefix of the tokens in order of falling logit, lower id first on a tie: all tokens above a
threshold, and the first few of those at it. A threshold is found bit by bit over the logits' order as whole numbers,
with one pass over the row for a bit; tied tokens weigh the same, so that their mass needs no order.
"""

# The argument lists of kernels stand in rows.
# fmt: off

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-2147483648)
"""Below every key. A float's key is a whole number of the same order: negative ones have all bits but the sign turned.

0 is added first, so that -0 becomes 0.
"""


@triton.jit
def _threshold(row, vocab, top, temperature, wanted, MODE: tl.constexpr, WIDTH: tl.constexpr):
    """The largest key from which on the tokens are ``wanted`` many (0), weigh as much (1), or more than that (2).

    The lowest key of all where they never do.
    """
    found = 0
    bit = -2147483648
    for _ in range(32):
        tried = found | bit
        bit = (bit >> 1) & 0x7FFFFFFF
        total = tl.full([WIDTH], 0, tl.int32 if MODE == 0 else tl.float32)
        for start in range(0, vocab, WIDTH):
            v = start + tl.arange(0, WIDTH)
            x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
            bits = (x + 0.0).to(tl.int32, bitcast=True)
            chosen = (v < vocab) & ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >= (tried ^ _LOWEST))
            if MODE == 0:
                total += tl.where(chosen, 1, 0)
            else:
                total += tl.where(chosen, tl.exp((x - top) / temperature), 0.0)
        reached = tl.sum(total, 0)
        if MODE == 2:
            found = tl.where(reached > wanted, tried, found)
        else:
            found = tl.where(reached >= wanted, tried, found)
    return found ^ _LOWEST


@triton.jit
def _at(row, vocab, key, top, temperature, WIDTH: tl.constexpr):
    """Of the tokens at ``key``: how many, the weight of one; and number and mass of those above it."""
    ties = tl.full([WIDTH], 0, tl.int32)
    count = tl.full([WIDTH], 0, tl.int32)
    mass = tl.full([WIDTH], 0, tl.float32)
    for start in range(0, vocab, WIDTH):
        v = start + tl.arange(0, WIDTH)
        x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        above = (v < vocab) & (keys > key)
        ties += tl.where((v < vocab) & (keys == key), 1, 0)
        count += tl.where(above, 1, 0)
        mass += tl.where(above, tl.exp((x - top) / temperature), 0.0)
    bits_of = key ^ ((key >> 31) & 0x7FFFFFFF)
    weight = tl.exp((bits_of.to(tl.float32, bitcast=True) - top) / temperature)
    return tl.sum(ties, 0), tl.where(weight == weight, weight, 0.0), tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _lightest(row, vocab, least, top, temperature, WIDTH: tl.constexpr):
    """The smallest key of a token that weighs at least ``least`` and more than nothing."""
    found = tl.full([WIDTH], 2147483647, tl.int32)
    for start in range(0, vocab, WIDTH):
        v = start + tl.arange(0, WIDTH)
        x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
        weight = tl.exp((x - top) / temperature)
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        found = tl.minimum(found, tl.where((v < vocab) & (weight >= least) & (weight > 0), keys, 2147483647))
    return tl.min(found, 0)


@triton.jit
def _id(row, vocab, key, place, WIDTH: tl.constexpr):
    """The id of the token number ``place`` from 0 of those at ``key``."""
    before = 0
    found = 0
    for start in range(0, vocab, WIDTH):
        v = start + tl.arange(0, WIDTH)
        x = tl.load(row + v, mask=v < vocab, other=float("-inf"))
        bits = (x + 0.0).to(tl.int32, bitcast=True)
        here = tl.where((v < vocab) & ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) == key), 1, 0)
        number = before + tl.cumsum(here, 0) - 1
        found += tl.sum(tl.where((here == 1) & (number == place), v, 0), 0)
        before += tl.sum(here, 0)
    return found


@triton.jit
def _largest(row, vocab, WIDTH: tl.constexpr):
    found = tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, vocab, WIDTH):
        v = start + tl.arange(0, WIDTH)
        found = tl.maximum(found, tl.load(row + v, mask=v < vocab, other=float("-inf")))
    return tl.max(found, 0)


@triton.jit
def draw(
    out, logits, temperatures, top_ks, top_ps, min_ps, uniforms, vocab, l_row,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, WIDTH: tl.constexpr,
):
    """The token of one row, see ``SamplingSpec.sample``; grid (N,). A row without finite logits gets any id."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * l_row
    top = _largest(row, vocab, WIDTH)
    top_bits = (top + 0.0).to(tl.int32, bitcast=True)
    key = top_bits ^ ((top_bits >> 31) & 0x7FFFFFFF)
    place = 0
    temperature = tl.load(temperatures + number)
    if GREEDY:
        temperature = 0.0
    if temperature > 0:
        temperature = tl.maximum(temperature, 1.1754943508222875e-38)
        edge = _LOWEST
        if TOP_K:
            wanted = tl.load(top_ks + number)
            wanted = tl.where(wanted > 0, tl.minimum(wanted, vocab), vocab)
            edge = _threshold(row, vocab, top, temperature, wanted, 0, WIDTH)
            ties, weight, count, mass = _at(row, vocab, edge, top, temperature, WIDTH)
            ties = tl.minimum(ties, tl.maximum(wanted - count, 0))
        else:
            ties, weight, count, mass = _at(row, vocab, edge, top, temperature, WIDTH)
        if TOP_P:
            wanted_mass = tl.load(top_ps + number)
            if wanted_mass < 1:
                wanted_mass = wanted_mass * (mass + ties * weight)
                other = _threshold(row, vocab, top, temperature, wanted_mass, 1, WIDTH)
                ties2, weight2, _, mass2 = _at(row, vocab, other, top, temperature, WIDTH)
                needed = tl.ceil((wanted_mass - mass2) / tl.maximum(weight2, 1e-38)).to(tl.int32)
                ties2 = tl.minimum(tl.maximum(needed, 1), ties2)
                if other > edge:
                    edge, ties, weight, mass = other, ties2, weight2, mass2
                elif other == edge:
                    ties = tl.minimum(ties, ties2)
        least = 0.0
        if MIN_P:
            least = tl.load(min_ps + number)
        lightest = _lightest(row, vocab, least, top, temperature, WIDTH)
        lightest = tl.minimum(lightest, key)
        if lightest > edge:
            edge = lightest
            ties, weight, _, mass = _at(row, vocab, edge, top, temperature, WIDTH)
        target = tl.load(uniforms + number) * (mass + ties * weight)
        drawn = tl.maximum(_threshold(row, vocab, top, temperature, target, 2, WIDTH), edge)
        ties3, weight3, _, mass3 = _at(row, vocab, drawn, top, temperature, WIDTH)
        ties3 = tl.where(drawn == edge, ties, ties3)
        key = drawn
        place = tl.floor((target - mass3) / tl.maximum(weight3, 1e-38)).to(tl.int32)
        place = tl.minimum(tl.maximum(place, 0), ties3 - 1)
    found = _id(row, vocab, key, place, WIDTH)
    tl.store(out + number, tl.minimum(found, vocab - 1).to(tl.int64))


@triton.jit
def count_tokens(counts, ids, vocab, i_row, length, PROMPT: tl.constexpr, WIDTH: tl.constexpr):
    """Occurrences in the output are added up in ``counts`` [N, V] int32, the prompt's set bit 30; grid (N, parts)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    token = tl.load(ids + row * i_row + i, mask=i < length, other=0)
    mask = (i < length) & (token < vocab)
    if PROMPT:
        tl.atomic_or(counts + row * vocab + token, tl.full([WIDTH], 1 << 30, tl.int32), mask=mask)
    else:
        tl.atomic_add(counts + row * vocab + token, tl.full([WIDTH], 1, tl.int32), mask=mask)


@triton.jit
def penalise(logits, counts, presence, frequency, repetition, vocab, l_row, WIDTH: tl.constexpr):
    """See ``SamplingSpec.apply_penalties``; grid (N, parts)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = v < vocab
    x = tl.load(logits + row * l_row + v, mask=mask, other=0)
    seen = tl.load(counts + row * vocab + v, mask=mask, other=0)
    count = (seen & 0x3FFFFFFF).to(tl.float32)
    factor = tl.where(seen != 0, tl.load(repetition + row), 1.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + row) * count
    x -= tl.where(count > 0, tl.load(presence + row), 0.0)
    tl.store(logits + row * l_row + v, x, mask=mask)
