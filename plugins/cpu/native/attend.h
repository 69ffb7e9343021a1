// Attention of the rows of a tile to one chunk of their context: scores, softmax, weighted values. Scores and weights are
// powers of two, since log2(e) goes into the scale. Each sum takes its terms in the order of positions, however rows,
// tokens and dimensions are cut, so cutting changes no bit.
#pragma once
#include "rows.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr int kChunkTokens = 128;
constexpr int kStretchTokens = 64;  // keys or values that all rows take before the next are read
constexpr int kTileRows = 36;       // queries times heads that share the reading of a chunk
constexpr float kNever = -3.0e38f;
constexpr float kLog2e = 1.44269504088896f;

// Queries [first, first + count) of one sequence with all query heads of one key head.
struct Tile {
  int seq, first, count, kv_head;
};

// What does not change during a call.
struct Plan {
  const AttentionArgs* a;
  int group, tile_queries;           // query heads per key head, queries per tile
  long block_wide, size_wide;        // a block's tokens and D, padded to whole vectors
  int chunk_blocks, chunk_tokens;
  long chunk_wide;

  int queries(int seq) const { return a->query_start[seq + 1] - a->query_start[seq]; }
  int position(const Tile& t, int query) const { return a->lens[t.seq] - queries(t.seq) + query; }
  int lowest(int position) const { return a->window > 0 ? larger(0, position - a->window + 1) : 0; }
  int first_chunk(const Tile& t) const { return lowest(position(t, t.first)) / chunk_tokens; }
  int end_chunk(const Tile& t) const { return position(t, t.first + t.count - 1) / chunk_tokens + 1; }
  int chunks(const Tile& t) const { return end_chunk(t) - first_chunk(t); }
  int rows(const Tile& t) const { return t.count * group; }
  long state_size(int rows) const { return long(rows) * (size_wide + W); }  // values, then maximum and sum
};

// Maximum, sum and values of rows of a tile, over some chunks. Values are undefined where the sum is 0.
struct State {
  float *values, *highest, *sum;
  State(float* memory, int rows, int size_wide) : values(memory), highest(memory + long(rows) * size_wide), sum(highest + rows) {}
};

// A thread's memory for one tile. keys: each vector of tokens of the chunk at d = 0; values: each block. What will be read
// soon: after_key, an equal share of the values for each vector of keys; after_value, a block of later keys or null.
struct Desk {
  float *queries, *scores, *key_scale, *value_scale;
  const void **keys, **values, **after_key, **after_value;

  Desk(const Plan& p, int rows) {
    const long query = long(rows) * p.size_wide, score = long(rows) * p.chunk_wide;
    queries = scratch_of<float>(kScores, query + score + 2 * p.chunk_wide);
    scores = queries + query;
    key_scale = scores + score;
    value_scale = key_scale + p.chunk_wide;
    keys = scratch_of<const void*>(kPanel, 2 * (p.chunk_wide / W + p.chunk_blocks));
    after_key = keys + p.chunk_wide / W;
    values = after_key + p.chunk_wide / W;
    after_value = values + p.chunk_blocks;
  }
};

// Tokens [low, high) of a chunk, counted from its first, and the blocks [first, end) that hold them.
struct Chunk {
  int index, start, low, high, first, end;

  Chunk(const Plan& p, const Tile& t, int i) : index(i), start(i * p.chunk_tokens) {
    low = larger(0, p.lowest(p.position(t, t.first)) - start);
    high = smaller(p.chunk_tokens, p.position(t, t.first + t.count - 1) + 1 - start);
    first = low / p.a->cache.block;
    end = (high + p.a->cache.block - 1) / p.a->cache.block;
  }
};

// 2^x for x <= 0 to about 2 ulp by Cephes' polynomial (exp2f.c); 0 below the smallest normal result, NaN stays NaN.
inline F exp2(F x) {
  const F low = set(-126.0f);
  F y = max(low, x);
  F n = round(y);
  F r = sub(y, n);
  F p = fma(set(1.535336188319500e-4f), r, set(1.339887440266574e-3f));
  p = fma(p, r, set(9.618437357674640e-3f));
  p = fma(p, r, set(5.550332471162809e-2f));
  p = fma(p, r, set(2.402264791363012e-1f));
  p = fma(p, r, set(6.931472028550421e-1f));
  p = fma(p, r, set(1.0f));
  return keep_unless_less(scale_by_power(p, n), x, low);
}

// function(constant R, r) for rows r..r+R, R at most kRows and as even as may be.
template <class Function>
inline void row_groups(int rows, Function&& function) {
  int groups = (rows + kRows - 1) / kRows;
  for (int r = 0; r < rows; --groups) {
    const int count = (rows - r + groups - 1) / groups;
    with_constant<kRows>(count, [&](auto n) { function(n, r); });
    r += count;
  }
}

// How many vectors a kernel holds beside R rows: enough sums in flight to hide the latency of a multiply-add.
constexpr int vectors_beside(int rows) { return rows == 1 ? 4 * kVecs : rows <= 3 ? 2 * kVecs : rows == 4 ? kRows * kVecs / 4 : kVecs; }

// sums[r][v] += row(r) * column(v)
template <int R, int V, class Row, class Column>
QIAO_INLINE inline void accumulate(F (&sums)[R][V], Row&& row, Column&& column) {
  if constexpr (R <= 3) {  // the fewer of both stay in registers
    F factor[R];
    each<R>([&](auto r) QIAO_INLINE { factor[r.value] = row(r); });
    each<V>([&](auto v) QIAO_INLINE {
      const F x = column(v);
      each<R>([&](auto r) QIAO_INLINE { sums[r.value][v.value] = fma(factor[r.value], x, sums[r.value][v.value]); });
    });
  } else {
    F factor[V];
    each<V>([&](auto v) QIAO_INLINE { factor[v.value] = column(v); });
    each<R>([&](auto r) QIAO_INLINE {
      const F x = row(r);
      each<V>([&](auto v) QIAO_INLINE { sums[r.value][v.value] = fma(x, factor[v.value], sums[r.value][v.value]); });
    });
  }
}

// Asks for memory that is read a little later. A block lies anywhere, so the processor cannot guess where the next is.
inline void ask_for(const void* p) { __builtin_prefetch(p, 0, 2); }

// scores[r][token] = q[r] . key[token] for R rows and V vectors of tokens, each given by its first key's place. While it
// reads them it asks for as much memory at each of `after`, unless that is null.
template <int R, int V, class T>
inline void score_vectors(const Plan& p, const float* q, const void* const* keys, const void* const* after, float* scores) {
  F sums[R][V];
  const T* key[V];
  const float* query[R];
  each<V>([&](auto v) QIAO_INLINE { key[v.value] = static_cast<const T*>(keys[v.value]); });
  each<R>([&](auto r) QIAO_INLINE {
    query[r.value] = q + r.value * p.size_wide;
    each<V>([&](auto v) QIAO_INLINE { sums[r.value][v.value] = zero(); });
  });
  constexpr int every = larger(1, 64 / int(W * sizeof(T)));
  const long step = p.a->cache.key_dim, size = p.a->cache.size;
  for (long d = 0; d < size; ++d) {
    if (after && d % every == 0)
      for (int v = 0; v < V; ++v) ask_for(static_cast<const T*>(after[v]) + d * W);
    accumulate<R, V>(sums, [&](auto r) QIAO_INLINE { return set(query[r.value][d]); }, [&](auto v) QIAO_INLINE { return load(key[v.value]); });
    each<V>([&](auto v) QIAO_INLINE { key[v.value] += step; });
  }
  each<R>([&](auto r) QIAO_INLINE {
    each<V>([&](auto v) QIAO_INLINE { store(scores + r.value * p.chunk_wide + v.value * W, sums[r.value][v.value]); });
  });
}

// All rows against the chunk's `count` vectors of tokens.
template <class T>
inline void score_rows(const Plan& p, int rows, const Desk& desk, int count, float* scores) {
  constexpr int stretch = kStretchTokens / W;
  for (int first = 0; first < count; first += stretch) {
    const int end = smaller(count, first + stretch);
    row_groups(rows, [&](auto n, int r) {
      constexpr int R = decltype(n)::value, V = vectors_beside(R);
      const float* q = desk.queries + long(r) * p.size_wide;
      float* s = scores + long(r) * p.chunk_wide;
      auto after = [&](int v) { return r == 0 ? desk.after_key + v : nullptr; };
      int v = first;
      for (; v + V <= end; v += V) score_vectors<R, V, T>(p, q, desk.keys + v, after(v), s + v * W);
      for (; v + kVecs <= end; v += kVecs) score_vectors<R, kVecs, T>(p, q, desk.keys + v, after(v), s + v * W);
      for (; v < end; ++v) score_vectors<R, 1, T>(p, q, desk.keys + v, after(v), s + v * W);
    });
  }
}

// Scores of one row to weights 2^(score - highest), 0 for tokens outside [low, high), counted from the first of `blocks`.
struct Softmax {
  const Plan& p;
  int run, run_wide, runs;  // tokens that lie side by side, and the vectors that they take; how many such
  F cap, over_cap;

  Softmax(const Plan& plan, int blocks) : p(plan), run(plan.a->cache.block), run_wide(plan.block_wide), runs(blocks) {
    if (run == run_wide) run *= blocks, run_wide = run, runs = 1;
    const float limit = plan.a->soft_cap;
    cap = set(limit * kLog2e);
    over_cap = set(limit > 0 ? 1.0f / limit : 0.0f);
  }

  F score(const float* s, const float* key_scale) const {
    F value = load(s);
    if (key_scale) value = mul(value, load(key_scale));
    return p.a->soft_cap > 0 ? mul(cap, tanh(mul(value, over_cap))) : value;
  }

  // The vector at i with kNever in its lanes outside [from, to).
  F edge(float* s, const float* key_scale, int i, int from, int to) const {
    float lanes[W];
    store(lanes, score(s + i, key_scale ? key_scale + i : nullptr));
    for (int j = 0; j < W; ++j) if (i + j < from || i + j >= to) lanes[j] = kNever;
    store(s + i, load(lanes));
    return load(lanes);
  }

  // Writes what `score` makes of each visible token, and kNever beside it in its vector. Returns the highest and `most`.
  F prepare(float* s, const float* key_scale, int from, int to, F most) const {
    if (from >= to) return most;
    const int inner = int(round_up(from, W)), end = to / W * W;
    if (inner > from || inner > end) most = max(most, edge(s, key_scale, from / W * W, from, to));
    if (!key_scale && p.a->soft_cap <= 0) {
      for (int i = inner; i < end; i += W) most = max(most, load(s + i));
    } else {
      for (int i = inner; i < end; i += W) {
        const F value = score(s + i, key_scale ? key_scale + i : nullptr);
        store(s + i, value);
        most = max(most, value);
      }
    }
    if (end < to && end >= inner) most = max(most, edge(s, key_scale, end, from, to));
    return most;
  }

  void clear(float* s, int from, int to) const {
    for (int i = from; i < to; i += W) store(s + i, zero());
  }

  // Returns the sum of the weights; they are multiplied by value_scale where there is one.
  float row(float* scores, const float* key_scale, const float* value_scale, int low, int high, float* highest_out) const {
    if (low >= high) {
      clear(scores, 0, runs * run_wide);
      *highest_out = kNever;
      return 0.0f;
    }
    auto visible = [&](int i, int& from, int& to) {
      from = larger(0, low - i * run), to = smaller(run, high - i * run);
      if (to <= from) from = to = 0;
    };
    F most = set(kNever);
    int from, to;
    for (int i = 0; i < runs; ++i) {
      visible(i, from, to);
      most = prepare(scores + i * run_wide, key_scale ? key_scale + i * run_wide : nullptr, from, to, most);
    }
    const float top = *highest_out = highest(most);
    F total = zero();
    for (int i = 0; i < runs; ++i) {
      visible(i, from, to);
      float* s = scores + i * run_wide;
      clear(s, 0, from / W * W);
      int j = from / W * W;
      for (; j < to; j += W) {
        F weight = exp2(sub(load(s + j), set(top)));
        total = add(total, weight);
        store(s + j, value_scale ? mul(weight, load(value_scale + i * run_wide + j)) : weight);
      }
      clear(s, j, run_wide);
    }
    return sum(total);
  }
};

// out[r][V vectors of D] = sum of weight[r][token] * value[token] over tokens [low, high) of the chunk, in their order,
// on top of what is there unless `fresh`. after[b]: what to ask for while block b is read.
template <int R, int V, class T>
inline void weigh_values(const Plan& p, int low, int high, const float* weights, const void* const* values, const void* const* after, int d, bool fresh, float* out) {
  const Cache& c = p.a->cache;
  F sums[R][V];
  const float* weight[R];
  each<R>([&](auto r) QIAO_INLINE {
    weight[r.value] = weights + r.value * p.chunk_wide;
    each<V>([&](auto v) QIAO_INLINE { sums[r.value][v.value] = fresh ? zero() : load(out + r.value * p.size_wide + v.value * W); });
  });
  const long step = c.value_token;
  for (int b = low / c.block; b * c.block < high; ++b) {
    const int from = larger(low - b * c.block, 0), to = smaller(high - b * c.block, c.block);
    const T* base = static_cast<const T*>(values[b]) + d + from * step;
    const T* next = after && after[b] ? static_cast<const T*>(after[b]) + d + from * step : nullptr;
    const long end = b * p.block_wide + to;
    for (long i = b * p.block_wide + from; i < end; ++i, base += step) {
      if (next) {
        for (int l = 0; l < V * W; l += 64 / int(sizeof(T))) ask_for(next + l);
        next += step;
      }
      accumulate<R, V>(sums, [&](auto r) QIAO_INLINE { return set(weight[r.value][i]); }, [&](auto v) QIAO_INLINE { return load(base + v.value * W); });
    }
  }
  each<R>([&](auto r) QIAO_INLINE {
    each<V>([&](auto v) QIAO_INLINE { store(out + r.value * p.size_wide + v.value * W, sums[r.value][v.value]); });
  });
}

template <class T>
inline void weigh_rows(const Plan& p, int rows, const Desk& desk, const Chunk& c, float* out) {
  const int block = p.a->cache.block, stretch = larger(1, kStretchTokens / block) * block;
  for (int first = c.first * block; first < c.high; first += stretch) {
    const int low = larger(c.low, first), high = smaller(c.high, first + stretch);
    row_groups(rows, [&](auto n, int r) {
      constexpr int R = decltype(n)::value, V = vectors_beside(R);
      const float* w = desk.scores + long(r) * p.chunk_wide;
      float* o = out + long(r) * p.size_wide;
      const void* const* after = r == 0 ? desk.after_value : nullptr;
      const bool fresh = first == c.first * block;
      int d = 0;
      for (; d + V * W <= p.size_wide; d += V * W) weigh_values<R, V, T>(p, low, high, w, desk.values, after, d, fresh, o + d);
      for (; d + kVecs * W <= p.size_wide; d += kVecs * W) weigh_values<R, kVecs, T>(p, low, high, w, desk.values, after, d, fresh, o + d);
      for (; d < p.size_wide; d += W) weigh_values<R, 1, T>(p, low, high, w, desk.values, after, d, fresh, o + d);
    });
  }
}

// Where the chunk's keys and values lie, copies of their scales, and where the keys of the next chunk lie if it is wanted.
template <class T>
inline void find_chunk(const Plan& p, const Tile& t, const Chunk& c, bool with_next, const Desk& desk) {
  const Cache& cache = p.a->cache;
  const int32_t* table = p.a->tables + t.seq * p.a->table_width + c.index * p.chunk_blocks;
  auto keys = [&](long block) { return static_cast<const T*>(cache.key) + block * cache.key_block + t.kv_head * cache.key_head; };
  const int later = with_next ? smaller(p.chunk_blocks, p.a->table_width - (c.index + 1) * p.chunk_blocks) : 0;
  int at = 0;
  for (int b = c.first; b < c.end; ++b) {
    const T* value = static_cast<const T*>(cache.value) + table[b] * cache.value_block + t.kv_head * cache.value_head;
    for (int i = 0; i < p.block_wide; i += W, ++at) {
      desk.keys[at] = keys(table[b]) + i;
      desk.after_key[at] = value + i * cache.size;
    }
    desk.values[b] = value;
    desk.after_value[b] = b < later ? keys(table[b + p.chunk_blocks]) : nullptr;
    if (cache.type != kSigned8) continue;
    const long scales = table[b] * cache.scale_block + t.kv_head * cache.scale_head;
    memcpy(desk.key_scale + b * p.block_wide, cache.key_scale + scales, sizeof(float) * cache.block);
    memcpy(desk.value_scale + b * p.block_wide, cache.value_scale + scales, sizeof(float) * cache.block);
  }
}

// One chunk for all rows of a tile. A row that sees nothing of it gets sum 0.
template <class T>
inline void attend_chunk(const Plan& p, const Tile& t, int index, bool with_next, const Desk& desk, State& out) {
  const Chunk c(p, t, index);
  const int rows = p.rows(t), block = p.a->cache.block, offset = c.first * p.block_wide;
  find_chunk<T>(p, t, c, with_next, desk);
  score_rows<T>(p, rows, desk, (c.end - c.first) * p.block_wide / W, desk.scores + offset);
  const bool scaled = p.a->cache.type == kSigned8;
  const float *key_scale = scaled ? desk.key_scale + offset : nullptr, *value_scale = scaled ? desk.value_scale + offset : nullptr;
  const Softmax softmax(p, c.end - c.first);
  for (int r = 0; r < rows; ++r) {
    const int at = p.position(t, t.first + r / p.group) - c.start;
    const int low = larger(0, p.lowest(at + c.start) - c.start) - c.first * block, high = smaller(p.chunk_tokens, at + 1) - c.first * block;
    out.sum[r] = softmax.row(desk.scores + long(r) * p.chunk_wide + offset, key_scale, value_scale, low, high, out.highest + r);
  }
  weigh_rows<T>(p, rows, desk, c, out.values);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
