// Linear layers with float sums. Whatever the number of rows, each output is made by the same steps: within stretches of
// kDepth along k one fused multiply-add after the other, then the stretches' sums added in order.
#pragma once
#include "panels.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr int kDepth = 256;        // a stretch of a widened strip fits into the first-level cache
constexpr int kBlockRows = 48;     // rows that share one widening
constexpr int kPanelRows = 768;    // rows widened at once, so that scratch memory stays small

// acc[r][.] += x[r][k] * panel[k] for k in [k, end), R rows of x and S strips.
template <int R, int S, class P>
inline void accumulate(const P* panels, const float* x, long ldx, int k, int end, F (&acc)[R][S * kVecs]) {
  while (k < end) {
    const int stop = panels[0].stop(k, end);
    typename P::Segment segments[S];
    for (int s = 0; s < S; ++s) segments[s] = panels[s].segment(k);
    for (; k < stop; ++k) {
      F w[S * kVecs];
      for (int s = 0; s < S; ++s) panels[s].load_k(k, segments[s], w + s * kVecs);
      for (int r = 0; r < R; ++r) {
        F value = set(x[r * ldx + k]);
        for (int j = 0; j < S * kVecs; ++j) acc[r][j] = fma(value, w[j], acc[r][j]);
      }
    }
  }
}

// Adds the bias and stores one row of one strip.
inline void finish(const MatmulArgs& a, int r, int strip, const F* total) {
  for (int v = 0; v < kVecs; ++v) {
    int column = strip * kStrip + v * W, n = a.out - column;
    if (n <= 0) return;
    F value = total[v];
    if (a.bias.data)
      with_type(a.bias.type, [&](auto t) { value = add(value, load_n(row<decltype(t)>(a.bias, 0) + column, n)); });
    with_type(a.y.type, [&](auto t) { store_n(row<decltype(t)>(a.y, r) + column, value, n); });
  }
}

// R rows by S neighbouring strips straight from the packed weight: the path bound by memory.
template <int R, int S, class P>
inline void few_rows(const MatmulArgs& a, const P* panels, const float* x, long ldx, int first_row, int strip) {
  F total[R][S * kVecs];
  for (auto& r : total) for (auto& t : r) t = zero();
  for (int k = 0; k < a.in; k += kDepth) {
    F acc[R][S * kVecs];
    for (auto& r : acc) for (auto& t : r) t = zero();
    accumulate<R, S>(panels, x, ldx, k, smaller(a.in, k + kDepth), acc);
    for (int r = 0; r < R; ++r) for (int j = 0; j < S * kVecs; ++j) total[r][j] = add(total[r][j], acc[r][j]);
  }
  for (int r = 0; r < R; ++r) for (int s = 0; s < S; ++s) finish(a, first_row + r, strip + s, total[r] + s * kVecs);
}

template <class P>
inline void add_stretch(const P& panel, const float* x, long ldx, int k, int end, int rows, float* totals) {
  for (int r = 0; r < rows; r += kRows) {
    with_constant<kRows>(smaller(kRows, rows - r), [&](auto n) {
      constexpr int R = decltype(n)::value;
      F acc[R][kVecs];
      for (auto& q : acc) for (auto& t : q) t = zero();
      accumulate<R, 1>(&panel, x + r * ldx, ldx, k, end, acc);
      for (int i = 0; i < R; ++i)
        for (int v = 0; v < kVecs; ++v) {
          float* t = totals + long(r + i) * kStrip + v * W;
          store(t, add(load(t), acc[i][v]));
        }
    });
  }
}

// Many rows by one strip: a stretch of the strip is widened once for all of them.
template <class P>
inline void many_rows(const MatmulArgs& a, const P& panel, const float* x, long ldx, int first_row, int rows, int strip) {
  float* totals = scratch_of<float>(kTotals, long(kBlockRows) * kStrip);
  float* wide = scratch_of<float>(kPanel, long(kDepth) * kStrip);
  memset(totals, 0, sizeof(float) * rows * kStrip);
  for (int k = 0; k < a.in; k += kDepth) {
    int end = smaller(a.in, k + kDepth);
    if (rows <= 2 * kRows) {
      add_stretch(panel, x, ldx, k, end, rows, totals);
      continue;
    }
    for (int i = k; i < end;) {
      int stop = panel.stop(i, end);
      auto segment = panel.segment(i);
      for (; i < stop; ++i) {
        F w[kVecs];
        panel.load_k(i, segment, w);
        for (int v = 0; v < kVecs; ++v) store(wide + long(i - k) * kStrip + v * W, w[v]);
      }
    }
    add_stretch(DensePanel<float>{wide}, x + k, ldx, 0, end - k, rows, totals);
  }
  for (int r = 0; r < rows; ++r) {
    F total[kVecs];
    for (int v = 0; v < kVecs; ++v) total[v] = load(totals + long(r) * kStrip + v * W);
    finish(a, first_row + r, strip, total);
  }
}

template <int R, int S, class Make>
inline void over_strips(const MatmulArgs& a, Make make, const float* x, long ldx, int first_row) {
  const int strips = (a.out + kStrip - 1) / kStrip;
  auto task = [&](int i) {
    if ((i + 1) * S <= strips) {
      decltype(make(0)) panels[S];
      for (int s = 0; s < S; ++s) panels[s] = make(i * S + s);
      few_rows<R, S>(a, panels, x, ldx, first_row, i * S);
      return;
    }
    for (int strip = i * S; strip < strips; ++strip) {
      auto panel = make(strip);
      few_rows<R, 1>(a, &panel, x, ldx, first_row, strip);
    }
  };
  parallel((strips + S - 1) / S, task);
}

// make(strip) gives the panel of a strip.
template <class Make>
inline void float_matmul(const MatmulArgs& a, Make make) {
  const int strips = (a.out + kStrip - 1) / kStrip;
  const long ldx = round_up(a.in, 16) + 16;  // rows a power of two apart would share few cache sets
  float* x = scratch_of<float>(kInput, ldx * smaller(a.rows, kPanelRows));
  for (int first = 0; first < a.rows; first += kPanelRows) {
    const int rows = smaller(kPanelRows, a.rows - first);
    over_rows(rows, a.in, [&](int from, int to) {
      for (int r = from; r < to; ++r)
        with_type(a.x.type, [&](auto t) { widen_row(row<decltype(t)>(a.x, first + r), x + r * ldx, a.in); });
    });
    const bool plenty = strips >= 16 * threads();  // enough strips to take several at once and still feed all threads
    if (rows == 1 && plenty) over_strips<1, 4>(a, make, x, ldx, first);
    else if (rows == 2 && plenty) over_strips<2, 2>(a, make, x, ldx, first);
    else if (rows <= kRows) with_constant<kRows>(rows, [&](auto n) { over_strips<decltype(n)::value, 1>(a, make, x, ldx, first); });
    else {
      const int blocks = (rows + kBlockRows - 1) / kBlockRows;
      auto task = [&](int i) {
        int strip = i / blocks, r = i % blocks * kBlockRows;
        many_rows(a, make(strip), x + r * ldx, ldx, first + r, smaller(kBlockRows, rows - r), strip);
      };
      parallel(strips * blocks, task);
    }
  }
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
