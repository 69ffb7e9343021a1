// Attention over block tables, decode and prefill alike. A context is cut into chunks at positions that depend on the
// block size alone; each chunk gives a query its own maximum, sum and weighted values, and these are merged in the order
// of the chunks. So a query's result is the same whoever shares the step, however its prefill was cut, and whether
// the chunks were taken by one thread or by many.
#pragma once
#include "rows.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr int kChunkTokens = 128;
constexpr int kTileRows = 36;  // queries times heads that share the reading of a chunk
constexpr float kNever = -3.0e38f;

// Queries [first, first + count) of one sequence with all query heads of one key head.
struct Tile {
  int seq, first, count, kv_head;
};

// What does not change during a call.
struct Plan {
  const AttentionArgs* a;
  int group, tile_queries;           // query heads per key head, queries per tile
  int block_wide, size_wide;         // a block's tokens and D, padded to whole vectors
  int chunk_blocks, chunk_tokens, chunk_wide;

  int queries(int seq) const { return a->query_start[seq + 1] - a->query_start[seq]; }
  int position(const Tile& t, int query) const { return a->lens[t.seq] - queries(t.seq) + query; }
  int lowest(int position) const { return a->window > 0 ? larger(0, position - a->window + 1) : 0; }
  int first_chunk(const Tile& t) const { return lowest(position(t, t.first)) / chunk_tokens; }
  int end_chunk(const Tile& t) const { return position(t, t.first + t.count - 1) / chunk_tokens + 1; }
  int rows(const Tile& t) const { return t.count * group; }
  long state_size(int rows) const { return long(rows) * (size_wide + W); }  // values, then maximum and sum
};

// Maximum, sum and values of rows of a tile, over some chunks.
struct State {
  float *values, *highest, *sum;
  State(float* memory, int rows, int size_wide) : values(memory), highest(memory + long(rows) * size_wide), sum(highest + rows) {}
};

template <class T>
inline long table_block(const Plan& p, const Tile& t, T block) { return p.a->tables[t.seq * p.a->table_width + block]; }

// The tile's queries times scale as float [row][D], a row for each query and head.
inline float* load_queries(const Plan& p, const Tile& t) {
  const AttentionArgs& a = *p.a;
  const int size = a.cache.size;
  float* out = scratch_of<float>(kQuery, long(p.rows(t)) * p.size_wide);
  for (int r = 0; r < p.rows(t); ++r) {
    const long token = a.query_start[t.seq] + t.first + r / p.group, head = t.kv_head * p.group + r % p.group;
    float* q = out + long(r) * p.size_wide;
    with_type(a.query.type, [&](auto type) {
      widen_row(static_cast<const decltype(type)*>(a.query.data) + token * a.query.token + head * a.query.head, q, size);
    });
    for (int d = 0; d < size; ++d) q[d] *= a.scale;
  }
  return out;
}

// How many vectors a kernel holds beside R rows: enough sums in flight to hide the latency of a multiply-add.
constexpr int vectors_beside(int rows) { return rows == 1 ? 4 * kVecs : rows <= 3 ? 2 * kVecs : kVecs; }

// scores[r][token] = q[r] . key[token] for R rows and V vectors of tokens, each given by its first key's place.
template <int R, int V, class T>
inline void score_vectors(const Plan& p, const float* q, const T* const* keys, float* scores) {
  F acc[R][V];
  for (auto& r : acc) for (auto& v : r) v = zero();
  const T* key[V];
  for (int v = 0; v < V; ++v) key[v] = keys[v];
  for (int d = 0; d < p.a->cache.size; ++d) {
    if constexpr (R <= 3) {  // the fewer of both stay in registers
      F value[R];
      for (int r = 0; r < R; ++r) value[r] = set(q[r * p.size_wide + d]);
      for (int v = 0; v < V; ++v) {
        F k = load(key[v] + d * p.a->cache.key_dim);
        for (int r = 0; r < R; ++r) acc[r][v] = fma(value[r], k, acc[r][v]);
      }
    } else {
      F k[V];
      for (int v = 0; v < V; ++v) k[v] = load(key[v] + d * p.a->cache.key_dim);
      for (int r = 0; r < R; ++r) {
        F value = set(q[r * p.size_wide + d]);
        for (int v = 0; v < V; ++v) acc[r][v] = fma(value, k[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) store(scores + r * p.chunk_wide + v * W, acc[r][v]);
}

// All rows against `count` vectors of tokens.
template <class T>
inline void score_rows(const Plan& p, int rows, const float* queries, const T* const* keys, int count, float* scores) {
  for (int r = 0; r < rows; r += kRows)
    with_constant<kRows>(smaller(kRows, rows - r), [&](auto n) {
      constexpr int R = decltype(n)::value, V = vectors_beside(R);
      const float* q = queries + r * p.size_wide;
      float* s = scores + r * p.chunk_wide;
      int v = 0;
      for (; v + V <= count; v += V) score_vectors<R, V>(p, q, keys + v, s + v * W);
      for (; v + kVecs <= count; v += kVecs) score_vectors<R, kVecs>(p, q, keys + v, s + v * W);
      for (; v < count; ++v) score_vectors<R, 1>(p, q, keys + v, s + v * W);
    });
}

// Scores of one row to weights e^(score - highest); tokens outside [low, high), counted from the first block, get 0.
inline void soften(const Plan& p, float* scores, int blocks, int low, int high, float* highest_out, float* sum_out) {
  const int block = p.a->cache.block;
  const F never = set(kNever), cap = set(p.a->soft_cap), over_cap = set(p.a->soft_cap > 0 ? 1.0f / p.a->soft_cap : 0.0f);
  F most = never;
  for (int b = 0; b < blocks; ++b) {
    for (int i = 0; i < p.block_wide; i += W) {
      float* s = scores + b * p.block_wide + i;
      const int from = low - b * block - i, to = smaller(high - b * block, block) - i;  // visible lanes
      F value = load(s);
      if (p.a->soft_cap > 0) value = mul(cap, tanh(mul(value, over_cap)));
      if (from > 0 || to < W) {
        float lanes[W];
        store(lanes, value);
        for (int j = 0; j < W; ++j) if (j < from || j >= to) lanes[j] = kNever;
        value = load(lanes);
      }
      store(s, value);
      most = max(most, value);
    }
  }
  const float top = highest(most);
  F total = zero();
  for (int i = 0; i < blocks * p.block_wide; i += W) {
    F value = load(scores + i);
    F weight = keep_unless_less(exp(sub(value, set(top))), value, set(kNever * 0.99f));
    store(scores + i, weight);
    total = add(total, weight);
  }
  *highest_out = top;
  *sum_out = sum(total);
}

// out[r][V vectors of D] = sum of weight[r][token] * value[token] over tokens [low, high) of the chunk, in their order.
template <int R, int V, class T>
inline void weigh_values(const Plan& p, const Tile& t, int chunk, int low, int high, const float* weights, const T* values, float* out) {
  const Cache& c = p.a->cache;
  F acc[R][V];
  for (auto& r : acc) for (auto& v : r) v = zero();
  for (int b = low / c.block; b * c.block < high; ++b) {
    const T* base = values + table_block(p, t, chunk * p.chunk_blocks + b) * c.value_block;
    const int from = larger(low - b * c.block, 0), to = smaller(high - b * c.block, c.block);
    for (int i = from; i < to; ++i) {
      F value[V];
      for (int v = 0; v < V; ++v) value[v] = load(base + i * c.value_token + v * W);
      for (int r = 0; r < R; ++r) {
        F weight = set(weights[r * p.chunk_wide + b * p.block_wide + i]);
        for (int v = 0; v < V; ++v) acc[r][v] = fma(weight, value[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) for (int v = 0; v < V; ++v) store(out + r * p.size_wide + v * W, acc[r][v]);
}

template <int R, int V, class T>
inline int weigh_slices(const Plan& p, const Tile& t, int chunk, int low, int high, const float* w, const T* values, float* out, int d) {
  for (; d + V * W <= p.size_wide; d += V * W) weigh_values<R, V>(p, t, chunk, low, high, w, values + d, out + d);
  return d;
}

template <class T>
inline void weigh_rows(const Plan& p, const Tile& t, int chunk, int low, int high, const float* weights, float* out) {
  const T* values = static_cast<const T*>(p.a->cache.value) + t.kv_head * p.a->cache.value_head;
  const int rows = p.rows(t);
  for (int r = 0; r < rows; r += kRows)
    with_constant<kRows>(smaller(kRows, rows - r), [&](auto n) {
      constexpr int R = decltype(n)::value, V = vectors_beside(R);
      const float* w = weights + r * p.chunk_wide;
      float* o = out + r * p.size_wide;
      int d = weigh_slices<R, V>(p, t, chunk, low, high, w, values, o, 0);
      d = weigh_slices<R, kVecs>(p, t, chunk, low, high, w, values, o, d);
      weigh_slices<R, 1>(p, t, chunk, low, high, w, values, o, d);
    });
}

// One chunk for all rows of a tile. A row that sees nothing of it gets sum 0.
template <class T>
inline void attend_chunk(const Plan& p, const Tile& t, int chunk, const float* queries, State& out) {
  const Cache& c = p.a->cache;
  const int start = chunk * p.chunk_tokens, rows = p.rows(t);
  const int low = larger(0, p.lowest(p.position(t, t.first)) - start);
  const int high = smaller(p.chunk_tokens, p.position(t, t.first + t.count - 1) + 1 - start);
  const int first_block = low / c.block, end_block = (high + c.block - 1) / c.block;
  float* scores = scratch_of<float>(kScores, long(rows) * p.chunk_wide);
  const T** keys = scratch_of<const T*>(kPanel, p.chunk_wide / W);
  int count = 0;
  for (int b = first_block; b < end_block; ++b) {
    const T* key = static_cast<const T*>(c.key) + table_block(p, t, chunk * p.chunk_blocks + b) * c.key_block + t.kv_head * c.key_head;
    for (int i = 0; i < p.block_wide; i += W) keys[count++] = key + i;
  }
  score_rows(p, rows, queries, keys, count, scores + first_block * p.block_wide);
  for (int r = 0; r < rows; ++r) {
    const int at = p.position(t, t.first + r / p.group);
    const int from = larger(0, p.lowest(at) - start) - first_block * c.block, to = smaller(p.chunk_tokens, at + 1 - start) - first_block * c.block;
    float* s = scores + r * p.chunk_wide + first_block * p.block_wide;
    soften(p, s, end_block - first_block, from, to, out.highest + r, out.sum + r);
  }
  weigh_rows<T>(p, t, chunk, low, high, scores, out.values);
}

// total := total and then `next`, for one row.
inline void merge_row(const Plan& p, State& total, const State& next, int r) {
  if (next.sum[r] == 0) return;  // saw nothing of the chunk
  float *a = total.values + r * p.size_wide, *b = next.values + r * p.size_wide;
  if (total.sum[r] == 0) {
    memcpy(a, b, sizeof(float) * p.size_wide);
    total.highest[r] = next.highest[r];
    total.sum[r] = next.sum[r];
    return;
  }
  const float top = total.highest[r] > next.highest[r] ? total.highest[r] : next.highest[r];
  float lanes[W];
  store(lanes, exp(set(total.highest[r] - top)));
  const float keep = lanes[0];
  store(lanes, exp(set(next.highest[r] - top)));
  const float take = lanes[0];
  for (int d = 0; d < p.size_wide; d += W) store(a + d, fma(load(b + d), set(take), mul(load(a + d), set(keep))));
  total.sum[r] = total.sum[r] * keep + next.sum[r] * take;
  total.highest[r] = top;
}

inline void clear(State& state, int rows) {
  for (int r = 0; r < rows; ++r) state.sum[r] = 0;
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
  const int rows = p.rows(t);
  const float* queries = load_queries(p, t);
  State total(scratch_of<float>(kState, p.state_size(rows)), rows, p.size_wide);
  State part(scratch_of<float>(kPartial, p.state_size(rows)), rows, p.size_wide);
  clear(total, rows);
  for (int chunk = p.first_chunk(t); chunk < p.end_chunk(t); ++chunk) {
    attend_chunk<T>(p, t, chunk, queries, part);
    for (int r = 0; r < rows; ++r) merge_row(p, total, part, r);
  }
  write_tile(p, t, total);
}

// Few tiles, long contexts: the chunks side by side, then merged in order.
template <class T>
inline void attend_split(const Plan& p, const Tile* tiles, int count) {
  long chunks = 0, floats = 0;
  for (int i = 0; i < count; ++i) {
    int n = p.end_chunk(tiles[i]) - p.first_chunk(tiles[i]);
    chunks += n;
    floats += n * p.state_size(p.rows(tiles[i]));
  }
  struct Piece { int tile, chunk; float* memory; };
  Piece* pieces = scratch_of<Piece>(kTotals, chunks);
  float* memory = scratch_of<float>(kInput, floats);
  for (int i = 0, at = 0; i < count; ++i)
    for (int c = p.first_chunk(tiles[i]); c < p.end_chunk(tiles[i]); ++c, memory += p.state_size(p.rows(tiles[i])))
      pieces[at++] = {i, c, memory};
  auto part = [&](int i) {
    const Tile& t = tiles[pieces[i].tile];
    State state(pieces[i].memory, p.rows(t), p.size_wide);
    attend_chunk<T>(p, t, pieces[i].chunk, load_queries(p, t), state);
  };
  parallel(int(chunks), part);
  for (int i = 0, at = 0; i < count; ++i) {
    const Tile& t = tiles[i];
    const int rows = p.rows(t);
    State total(scratch_of<float>(kState, p.state_size(rows)), rows, p.size_wide);
    clear(total, rows);
    for (int c = p.first_chunk(t); c < p.end_chunk(t); ++c, ++at)
      for (int r = 0; r < rows; ++r) merge_row(p, total, State(pieces[at].memory, rows, p.size_wide), r);
    write_tile(p, t, total);
  }
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
  for (int s = 0; s < a.seqs; ++s) count += (p.queries(s) + p.tile_queries - 1) / p.tile_queries * a.cache.heads;
  Tile* tiles = scratch_of<Tile>(kUnits, count);
  long at = 0, most_chunks = 0;
  for (int s = 0; s < a.seqs; ++s)
    for (int q = p.queries(s); q > 0; q -= p.tile_queries) {  // the last queries first: they have most to do
      const int first = larger(0, q - p.tile_queries);
      for (int h = 0; h < a.cache.heads; ++h) tiles[at++] = {s, first, q - first, h};
      const long chunks = p.end_chunk(tiles[at - 1]) - p.first_chunk(tiles[at - 1]);
      most_chunks = chunks > most_chunks ? chunks : most_chunks;
    }
  with_type(a.cache.type, [&](auto t) {
    using T = decltype(t);
    if (threads() > 1 && count < 4 * threads() && most_chunks > 1) return attend_split<T>(p, tiles, int(count));
    auto task = [&](int i) { attend_tile<T>(p, tiles[i]); };
    parallel(int(count), task);
  });
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
