// Linear layers with float sums. Whatever the number of rows, each output is made by the same steps: within stretches of
// kDepth along k one fused multiply-add after the other, then the stretches' sums added in order.
#pragma once
#include <atomic>
#include <type_traits>

#include "panels.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr int kDepth = 320;        // most k of a stretch: so much of a strip fits into the first-level cache
constexpr int kLine = kDepth + 16; // floats from row to row of a widened stretch of x; a power of two would share few cache sets
constexpr int kBlockRows = 96;     // rows of a task: their stretch of x and their sums fit into the second-level cache
constexpr int kBlockStrips = 32;   // strips of a task: widening its rows of x is then little work
constexpr int kFewVecs = 8;        // vectors of sums that hide the latency of a multiply-add
constexpr int kPanelRows = 768;    // rows rounded to int8 at once

// Values of k + i, i < kStepOf; Tight where the sums leave no register to spare.
template <bool Tight, class P>
inline void load_k(const P& panel, int k, int, const typename P::Segment& segment, F* w) { panel.load_k(k, segment, w); }
template <bool Tight>
inline void load_k(const PairPanel<float>& panel, int k, int i, const PairPanel<float>::Segment&, F* w) { panel.load_half<Tight>(k, i, w); }

// acc[r][.] = the sum of x[r][k] * panel[k] for k in [k, end), R rows of x and S strips. x starts at k; its rows are kLine
// apart and have a zero behind an odd end.
template <int R, int S, class P>
inline __attribute__((always_inline)) void float_tile(const P* panels, const float* x, int k, int end, F (&acc)[R][S * kVecs]) {
  constexpr int step = kStepOf<P>;
  constexpr bool tight = R * S * kVecs + kVecs + 2 >= kRegisters;
  P panel[S];
  F sum[R][S * kVecs];
#pragma GCC unroll 16
  for (int s = 0; s < S; ++s) panel[s] = panels[s];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < S * kVecs; ++j) sum[r][j] = zero();
  while (k < end) {
    const int stop = panels[0].stop(k, end);
    typename P::Segment segments[S];
    for (int s = 0; s < S; ++s) segments[s] = panel[s].segment(k);
    for (; k < stop; k += step, x += step)
#pragma GCC unroll 16
      for (int s = 0; s < S; ++s)
#pragma GCC unroll 16
        for (int i = 0; i < step; ++i) {
          F w[kVecs];
          load_k<tight>(panel[s], k, i, segments[s], w);
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const F value = set(x[r * kLine + i]);
#pragma GCC unroll 16
            for (int v = 0; v < kVecs; ++v) sum[r][s * kVecs + v] = fma(value, w[v], sum[r][s * kVecs + v]);
          }
        }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < S * kVecs; ++j) acc[r][j] = sum[r][j];
}

// What instructions for pairs of bfloat16 ask for: of k in a stretch to be a multiple, of rows of x to be readable, and of a
// thread to do before and after.
#if defined(QIAO_AMX)
#include "tiles.inc"
#else
constexpr int kPairDepth = 2, kReadRows = 1;
struct PairUnit {};
#if defined(QIAO_DOT_BF16)
// As above, of pairs: x holds R rows of bfloat16 pairs, each in the place of one float. The same instructions in the same
// order for any number of rows.
template <int R, int S>
inline __attribute__((always_inline)) void pair_tile(const PairPanel<bf16>* panels, const float* x, int k, int end, F (&acc)[R][S * kVecs]) {
  F sum[R][S * kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < S * kVecs; ++j) sum[r][j] = zero();
  for (; k < end; k += 2, ++x)
#pragma GCC unroll 16
    for (int s = 0; s < S; ++s) {
      const bf16* pairs = panels[s].pairs(k);
      panels[s].ask_ahead(k);
      B w[kVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) w[v] = load_bytes(pairs + 2 * W * v);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const B value = spread(x + r * kLine);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) sum[r][s * kVecs + v] = dot_bf16(sum[r][s * kVecs + v], w[v], value);
      }
    }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < S * kVecs; ++j) acc[r][j] = sum[r][j];
}
#endif
#endif

// Declared everywhere, needed where there are such instructions.
template <int R, int S>
void pair_tile(const PairPanel<bf16>* panels, const float* x, int k, int end, F (&acc)[R][S * kVecs]);

template <int R, int S, class P>
inline __attribute__((always_inline)) void tile(const P* panels, const float* x, int k, int end, F (&acc)[R][S * kVecs]) {
  if constexpr (std::is_same<P, PairPanel<bf16>>::value) pair_tile<R, S>(panels, x, k, end, acc);
  else float_tile<R, S>(panels, x, k, end, acc);
}

template <class P> struct Unit {};
template <> struct Unit<PairPanel<bf16>> : PairUnit {};
template <class P> constexpr int kDepthUnit = 2;
template <> constexpr int kDepthUnit<PairPanel<bf16>> = kPairDepth;

// k of a stretch: as even as can be, and the same for all rows.
template <class P>
inline int depth_of(const MatmulArgs& a) {
  const int stretches = (a.in + kDepth - 1) / kDepth;
  return int(round_up((a.in + stretches - 1) / stretches, kDepthUnit<P>));
}

// Memory for so many rows of a stretch.
inline long rows_room(long rows) { return (rows + kReadRows - 1) * kLine; }

// A stretch of rows as float, kLine apart, with a zero behind its end.
template <class P>
inline void take_stretch(const MatmulArgs& a, int first, int rows, int k, int n, float* to) {
  with_type(a.x.type, [&](auto t) {
    for (int r = 0; r < rows; ++r) {
      widen_row(row<decltype(t)>(a.x, first + r) + k, to + r * kLine, n);
      to[r * kLine + n] = 0;
    }
  });
}
// As bfloat16, with zeros up to whole steps.
template <>
inline void take_stretch<PairPanel<bf16>>(const MatmulArgs& a, int first, int rows, int k, int n, float* to) {
  for (int r = 0; r < rows; ++r) {
    char* out = reinterpret_cast<char*>(to + r * kLine);
    memcpy(out, row<bf16>(a.x, first + r) + k, n * sizeof(bf16));
    memset(out + n * sizeof(bf16), 0, (round_up(n, kPairDepth) - n) * sizeof(bf16));
  }
}

// Adds the bias and stores one row of one strip.
inline void finish(const MatmulArgs& a, int r, int strip, const F* total) {
  const int column = strip * kStrip;
  F value[kVecs];
  for (int v = 0; v < kVecs; ++v) value[v] = total[v];
  if (a.bias.data)
    with_type(a.bias.type, [&](auto t) {
      for (int v = 0; v < kVecs && column + v * W < a.out; ++v)
        value[v] = add(value[v], load_n(row<decltype(t)>(a.bias, 0) + column + v * W, a.out - column - v * W));
    });
  with_type(a.y.type, [&](auto t) {
    auto* y = row<decltype(t)>(a.y, r) + column;
    if (column + kStrip <= a.out) for (int v = 0; v < kVecs; ++v) store(y + v * W, value[v]);
    else for (int v = 0; v < kVecs && column + v * W < a.out; ++v) store_n(y + v * W, value[v], a.out - column - v * W);
  });
}

// Indices for the pool's threads. Each thread takes a run of neighbours, which lie together in memory, and when it is through
// some of another's: a processor fetches ahead along a run, not across what other threads read.
class Runs {
 public:
  explicit Runs(int count) : workers_(larger(1, smaller(threads(), count))), size_(smaller(kMost, workers_)) {
    for (int i = 0; i < size_; ++i) runs_[i].next = int(long(count) * i / size_), runs_[i].end = int(long(count) * (i + 1) / size_);
  }
  int workers() const { return workers_; }  // threads that can find something; those beyond kMost share runs
  // Takes up to `most` for thread `own`, fewer towards the end of a run; returns how many, from `first`; 0 when all are taken.
  int take(int own, int most, int* first) {
    for (int i = 0; i < size_; ++i) {
      Run& run = runs_[(own + i) % size_];
      int at = run.next.load(std::memory_order_relaxed), n;
      do {
        if (at >= run.end) break;
        n = smaller(most, larger(1, (run.end - at) / 2));
      } while (!run.next.compare_exchange_weak(at, at + n, std::memory_order_relaxed));
      if (at < run.end) return *first = at, n;
    }
    return 0;
  }

 private:
  static constexpr int kMost = 64;
  struct alignas(64) Run { std::atomic<int> next; int end; };
  Run runs_[kMost];
  const int workers_, size_;
};

// Calls task(i) for each i < count, in runs.
template <class Task>
inline void in_runs(int count, Task& task) {
  Runs runs(count);
  auto worker = [&](int own) {
    for (int at; runs.take(own, 1, &at);) task(at);
  };
  parallel(runs.workers(), worker);
}

// R rows by S neighbouring strips straight from the packed weight.
template <int R, int S, class P>
inline void few_rows(const MatmulArgs& a, const P* panels, const float* x, int strip) {
  F total[R][S * kVecs];
  const int depth = depth_of<P>(a);
  for (int k = 0; k < a.in; k += depth, x += R * kLine) {
    F acc[R][S * kVecs];
    tile<R, S>(panels, x, k, smaller(a.in, k + depth), acc);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < S * kVecs; ++j) total[r][j] = k ? add(total[r][j], acc[r][j]) : acc[r][j];
  }
  for (int r = 0; r < R; ++r) for (int s = 0; s < S; ++s) finish(a, r, strip + s, total[r] + s * kVecs);
}

// The path bound by memory: every thread widens the R rows for itself, which is quicker than waiting for each other, and
// takes as many strips at a time as hide the latency of its sums.
template <int R, class Make>
inline void over_strips(const MatmulArgs& a, Make make) {
  constexpr int most = larger(1, kFewVecs / (R * kVecs));
  using P = decltype(make(0));
  Runs runs((a.out + kStrip - 1) / kStrip);
  auto worker = [&](int own) {
    [[maybe_unused]] const Unit<P> unit;
    float* x = nullptr;
    for (int first, n; (n = runs.take(own, most, &first)) > 0;) {
      if (!x) {
        const int depth = depth_of<P>(a);
        x = scratch_of<float>(kInput, rows_room((a.in + depth - 1L) / depth * R));
        for (int k = 0; k < a.in; k += depth) take_stretch<P>(a, 0, R, k, smaller(depth, a.in - k), x + k / depth * R * kLine);
      }
      with_constant<most>(n, [&](auto count) {
        constexpr int S = decltype(count)::value;
        P panels[S];
        for (int s = 0; s < S; ++s) panels[s] = make(first + s);
        few_rows<R, S>(a, panels, x, first);
      });
    }
  };
  parallel(runs.workers(), worker);
}

// Rows and strips of one task.
struct Block {
  int row, rows, strip, strips;
};

// One stretch of one strip by all rows of a block, kRows at a time; `at` is where the panel's own k begins.
template <class P>
inline void add_stretch(const MatmulArgs& a, const Block& b, const P& panel, const float* x, int at, int k, int end, int strip,
                        float* totals) {
  const int tiles = (b.rows + kRows - 1) / kRows;
  for (int i = 0, r = 0; i < tiles; ++i) {
    const int n = (b.rows - r) / (tiles - i);  // as even as can be: a tile of few rows waits for its own sums
    with_constant<kRows>(n, [&](auto count) {
      constexpr int R = decltype(count)::value;
      F acc[R][kVecs];
      tile<R, 1>(&panel, x + r * kLine, k - at, end - at, acc);
      for (int j = 0; j < R; ++j) {
        float* total = totals + long(r + j) * kStrip;
        if (k) for (int v = 0; v < kVecs; ++v) acc[j][v] = add(load(total + v * W), acc[j][v]);
        if (end == a.in) finish(a, b.row + r + j, strip, acc[j]);
        else for (int v = 0; v < kVecs; ++v) store(total + v * W, acc[j][v]);
      }
    });
    r += n;
  }
}

// A stretch of a strip as float.
template <class P>
inline void widen_strip(const P& panel, int k, int end, float* to) {
  constexpr int step = kStepOf<P>;
  while (k < end) {
    const int stop = panel.stop(k, end);
    const auto segment = panel.segment(k);
    for (; k < stop; k += step, to += step * kStrip)
      for (int i = 0; i < step; ++i) {
        F w[kVecs];
        load_k<false>(panel, k, i, segment, w);
        for (int v = 0; v < kVecs; ++v) store(to + i * kStrip + v * W, w[v]);
      }
  }
}

// Where the next piece of a dense weight will be read, so that it is under way by then.
template <class P> inline void look_ahead(P&, const P&, int, int) {}
template <class T>
inline void look_ahead(DensePanel<T>& panel, const DensePanel<T>& next, int k, int next_k) {
  panel.ahead = (next.base + long(next_k) * kStrip - (panel.base + long(k) * kStrip)) * long(sizeof(T));
}
template <class X>
inline void look_ahead(PairPanel<X>& panel, const PairPanel<X>& next, int k, int next_k) {
  panel.ahead = (next.base + long(next_k) * kStrip - (panel.base + long(k) * kStrip)) * long(sizeof(bf16));
}

// Tiles of rows up to which a panel is read as it is; more of them share one widening. 16-bit numbers are widened by units
// that multiply-adds leave idle, unless vectors are so wide that both share a port.
constexpr int kNeverWiden = 1 << 20;
template <class P> constexpr int kWidenFrom = 1;
template <> constexpr int kWidenFrom<DensePanel<float>> = kNeverWiden;
template <> constexpr int kWidenFrom<DensePanel<f16>> = W == 16 ? 2 : kNeverWiden;
template <> constexpr int kWidenFrom<PairPanel<float>> = W == 16 ? 2 : kNeverWiden;
template <> constexpr int kWidenFrom<PairPanel<bf16>> = kNeverWiden;

// The path bound by arithmetic. The weights are read once for all rows of the block, stretch by stretch.
template <class Make>
inline void many_rows(const MatmulArgs& a, const Block& b, Make make) {
  using P = decltype(make(0));
  [[maybe_unused]] const Unit<P> unit;
  float* x = scratch_of<float>(kInput, rows_room(b.rows));
  float* totals = scratch_of<float>(kTotals, long(b.strips) * b.rows * kStrip);
  [[maybe_unused]] float* wide = kWidenFrom<P> == kNeverWiden ? nullptr : scratch_of<float>(kPanel, long(kDepth) * kStrip);
  const int depth = depth_of<P>(a);
  for (int k = 0; k < a.in; k += depth) {
    const int end = smaller(a.in, k + depth);
    take_stretch<P>(a, b.row, b.rows, k, end - k, x);
    for (int s = 0; s < b.strips; ++s) {
      P panel = make(b.strip + s);
      const bool last = s + 1 == b.strips;
      look_ahead(panel, make(b.strip + (last ? 0 : s + 1)), k, last ? (end < a.in ? end : 0) : k);
      float* total = totals + long(s) * b.rows * kStrip;
      if constexpr (kWidenFrom<P> != kNeverWiden) {
        if (b.rows > kWidenFrom<P> * kRows) {
          widen_strip(panel, k, end, wide);
          add_stretch(a, b, DensePanel<float>{wide, 0}, x, k, k, end, b.strip + s, total);
          continue;
        }
      }
      add_stretch(a, b, panel, x, 0, k, end, b.strip + s, total);
    }
  }
}

// count in parts of at most `most`, as even as whole units allow: the size of a part.
inline int even_part(int count, int most, int unit) {
  const int parts = (count + most - 1) / most;
  return smaller(most, int(round_up((count + parts - 1) / parts, unit)));
}

// make(strip) gives the panel of a strip.
template <class Make>
inline void float_matmul(const MatmulArgs& a, Make make) {
  if (a.rows <= kRows) return with_constant<kRows>(larger(1, a.rows), [&](auto n) { if (a.rows) over_strips<decltype(n)::value>(a, make); });
  const int strips = (a.out + kStrip - 1) / kStrip, wanted = 4 * threads();
  const int rows = even_part(a.rows, kBlockRows, kRows), row_blocks = (a.rows + rows - 1) / rows;
  const int most = larger(1, smaller(kBlockStrips, int(long(strips) * row_blocks / wanted)));
  const int together = even_part(strips, most, 1);
  auto task = [&](int i) {
    const int row = i % row_blocks * rows, strip = i / row_blocks * together;
    many_rows(a, {row, smaller(rows, a.rows - row), strip, smaller(together, strips - strip)}, make);
  };
  const int groups = (strips + together - 1) / together;
  if (row_blocks == 1) in_runs(groups, task);
  else parallel(groups * row_blocks, task);
}

// bfloat16 weights, X as in PairPanel.
template <class X>
inline void pair_matmul(const MatmulArgs& a) {
  const long strip = round_up(a.in, 2) * kStrip;
  float_matmul(a, [&a, strip](int i) { return PairPanel<X>{static_cast<const bf16*>(a.weight) + i * strip}; });
}

// Any dense weight.
inline void dense_matmul(const MatmulArgs& a) {
  if (a.type == kBFloat16) return pair_matmul<float>(a);
  const long strip = long(a.in) * kStrip;
  if (a.type == kFloat32) float_matmul(a, [&a, strip](int i) { return DensePanel<float>{static_cast<const float*>(a.weight) + i * strip}; });
  else float_matmul(a, [&a, strip](int i) { return DensePanel<f16>{static_cast<const f16*>(a.weight) + i * strip}; });
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
