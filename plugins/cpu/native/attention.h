// Attention over block tables, decode and prefill alike. A context is cut into chunks at positions that depend on the
// block size alone; each chunk gives a query its own maximum, sum and weighted values, and these are merged in the order
// of the chunks. So a query's result is the same whoever shares the step, however its prefill was cut, and whether
// the chunks were taken by one thread or by many.
#pragma once
#include "attend.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr long kAloneWork = 100000;      // scores times D below which waking a thread costs more than it brings
constexpr long kFewFloats = 32768;       // of states that one thread merges
constexpr long kMostFloats = 32L << 20;  // of states in memory; beyond it the tiles are shared out whole

// The tile's queries times scale as float [row][D], a row for each query and head.
inline void load_queries(const Plan& p, const Tile& t, float* out) {
  const AttentionArgs& a = *p.a;
  const int size = a.cache.size;
  const F scale = set(a.soft_cap > 0 ? a.scale : a.scale * kLog2e);  // with a cap log2(e) follows the tanh
  for (int r = 0; r < p.rows(t); ++r, out += p.size_wide) {
    const long token = a.query_start[t.seq] + t.first + r / p.group, head = t.kv_head * p.group + r % p.group;
    with_type(a.query.type, [&](auto type) {
      const auto* q = static_cast<const decltype(type)*>(a.query.data) + token * a.query.token + head * a.query.head;
      for (int d = 0; d < size; d += W) store(out + d, mul(load_n(q + d, size - d), scale));
    });
  }
}

// total := total and then `next`, row by row.
inline void merge(const Plan& p, int rows, State& total, const State& next) {
  for (int first = 0; first < rows; first += W) {
    float keep[W], take[W], top[W];
    const F a = load(total.highest + first), b = load(next.highest + first), most = max(a, b);
    store(top, most);
    store(keep, exp2(sub(a, most)));
    store(take, exp2(sub(b, most)));
    for (int r = first; r < smaller(rows, first + W); ++r) {
      if (next.sum[r] == 0) continue;  // saw nothing of the chunk
      float *to = total.values + r * p.size_wide, *from = next.values + r * p.size_wide;
      const bool fresh = total.sum[r] == 0;
      const F kept = set(keep[r - first]), taken = set(take[r - first]);
      for (int d = 0; d < p.size_wide; d += W)
        store(to + d, fresh ? load(from + d) : fma(load(from + d), taken, mul(load(to + d), kept)));
      total.sum[r] = fresh ? next.sum[r] : total.sum[r] * keep[r - first] + next.sum[r] * take[r - first];
      total.highest[r] = top[r - first];
    }
  }
}

inline void write_tile(const Plan& p, const Tile& t, const State& state) {
  const AttentionArgs& a = *p.a;
  for (int r = 0; r < p.rows(t); ++r) {
    const long token = a.query_start[t.seq] + t.first + r / p.group, head = t.kv_head * p.group + r % p.group;
    const F divisor = set(state.sum[r]);
    with_type(a.out.type, [&](auto type) {
      auto* out = static_cast<decltype(type)*>(a.out.data) + token * a.out.token + head * a.out.head;
      for (int d = 0; d < a.cache.size; d += W) store_n(out + d, div(load(state.values + r * p.size_wide + d), divisor), a.cache.size - d);
    });
  }
}

// A tile by itself, chunk after chunk.
template <class T>
inline void attend_tile(const Plan& p, const Tile& t) {
  const int rows = p.rows(t), end = p.end_chunk(t);
  float* memory = scratch_of<float>(kState, 2 * p.state_size(rows));
  State total(memory, rows, p.size_wide), part(memory + p.state_size(rows), rows, p.size_wide);
  const Desk desk(p, rows);
  load_queries(p, t, desk.queries);
  int chunk = p.first_chunk(t);
  attend_chunk<T>(p, t, chunk, chunk + 1 < end, desk, total);
  while (++chunk < end) {
    attend_chunk<T>(p, t, chunk, chunk + 1 < end, desk, part);
    merge(p, rows, total, part);
  }
  write_tile(p, t, total);
}

// Chunks [first, end) of a tile, each with a state of its own.
struct Piece {
  const Tile* tile;
  int first, end;
  float* states;
};

// A few long contexts: pieces of them side by side, then each tile's chunks are merged in order.
template <class T>
inline void attend_split(const Plan& p, const Tile* tiles, int count, long chunks) {
  const int longest = larger(1, int(chunks / (4 * threads())));  // chunks of a piece
  long floats = 0, most = 0;
  for (int i = 0; i < count; ++i) {
    floats += p.chunks(tiles[i]) * p.state_size(p.rows(tiles[i]));
    most += p.chunks(tiles[i]) / longest + 1;
  }
  Piece* pieces = scratch_of<Piece>(kTotals, most);
  float* memory = scratch_of<float>(kInput, floats);
  float** states = scratch_of<float*>(kQuery, count);
  int made = 0;
  for (int i = 0; i < count; ++i) {
    const int end = p.end_chunk(tiles[i]);
    states[i] = memory;
    for (int c = p.first_chunk(tiles[i]); c < end; c += longest) {
      pieces[made] = {&tiles[i], c, smaller(end, c + longest), memory};
      memory += (pieces[made].end - c) * p.state_size(p.rows(tiles[i]));
      ++made;
    }
  }
  auto part = [&](int i) {
    const Tile& t = *pieces[i].tile;
    const int rows = p.rows(t);
    const Desk desk(p, rows);
    load_queries(p, t, desk.queries);
    float* at = pieces[i].states;
    for (int c = pieces[i].first; c < pieces[i].end; ++c, at += p.state_size(rows)) {
      State state(at, rows, p.size_wide);
      attend_chunk<T>(p, t, c, c + 1 < pieces[i].end, desk, state);
    }
  };
  parallel(made, part);
  auto join = [&](int i) {
    const Tile& t = tiles[i];
    const int rows = p.rows(t);
    State total(states[i], rows, p.size_wide);
    for (int c = 1; c < p.chunks(t); ++c) merge(p, rows, total, State(states[i] + c * p.state_size(rows), rows, p.size_wide));
    write_tile(p, t, total);
  };
  if (floats > kFewFloats) return parallel(count, join);
  for (int i = 0; i < count; ++i) join(i);
}

inline Plan make_plan(const AttentionArgs& a) {
  Plan p{};
  p.a = &a;
  p.group = a.heads / a.cache.heads;
  p.tile_queries = larger(1, kTileRows / p.group);
  p.block_wide = int(round_up(a.cache.block, W));
  p.size_wide = int(round_up(a.cache.size, W));
  p.chunk_blocks = larger(1, kChunkTokens / a.cache.block);
  p.chunk_tokens = p.chunk_blocks * a.cache.block;
  p.chunk_wide = p.chunk_blocks * p.block_wide;
  return p;
}

inline void attention(const AttentionArgs& a) {
  const Plan p = make_plan(a);
  long count = 0;
  for (int s = 0; s < a.seqs; ++s) count += long(p.queries(s) + p.tile_queries - 1) / p.tile_queries * a.cache.heads;
  Tile* tiles = scratch_of<Tile>(kUnits, count);
  long at = 0, chunks = 0, longest = 0, work = 0, floats = 0;
  for (int s = 0; s < a.seqs; ++s)
    for (int q = p.queries(s); q > 0; q -= p.tile_queries) {  // the last queries first: they have most to do
      const int first = larger(0, q - p.tile_queries);
      for (int h = 0; h < a.cache.heads; ++h) tiles[at++] = {s, first, q - first, h};
      const Tile& t = tiles[at - 1];
      const long n = p.chunks(t), own = long(p.rows(t)) * (p.position(t, q - first) - p.first_chunk(t) * p.chunk_tokens);
      chunks += n * a.cache.heads;
      work += own * a.cache.heads;
      longest = own > longest ? own : longest;
      floats += n * a.cache.heads * p.state_size(p.rows(t));
    }
  const bool alone = threads() == 1 || work * a.cache.size < kAloneWork;
  const bool split = !alone && longest * 4 * threads() > work && chunks > count && floats < kMostFloats;
  with_cache_type(a.cache.type, [&](auto t) {
    using T = decltype(t);
    if (split) return attend_split<T>(p, tiles, int(count), chunks);
    auto task = [&](int i) { attend_tile<T>(p, tiles[i]); };
    if (!alone) return parallel(int(count), task);
    for (int i = 0; i < count; ++i) task(i);
  });
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
