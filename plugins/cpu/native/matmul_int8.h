// Linear layers on int8 activations: exact integer products, scaled and added in float in the order of the blocks.
#pragma once
#include "matmul.h"

namespace qiao {
namespace QIAO_VARIANT {

// codes = round(x / step), step = max |x| / 127 over n values (n a multiple of W, or the row's tail padded with zeros).
// Returns the step; NaN or infinity in x makes it NaN, so that it is not lost.
template <class T>
inline float quantize_stretch(const T* x, int n, int8_t* codes, int padded, int32_t* sum_of_codes) {
  F most = zero(), poison = zero();
  for (int i = 0; i < n; i += W) {
    F value = load_n(x + i, n - i);
    most = max(most, abs(value));
    poison = add(poison, sub(value, value));
  }
  const float step = highest(most) / 127.0f, unit = step > 0 ? step : 1.0f;
  int32_t total = 0, lanes[W];
  for (int i = 0; i < padded; i += W) {
    F value = i < n ? load_n(x + i, n - i) : zero();
    store(lanes, to_int(div(value, set(unit))));
    for (int j = 0; j < W && i + j < padded; ++j) {
      int code = smaller(127, larger(-127, lanes[j]));
      codes[i + j] = int8_t(code);
      total += code;
    }
  }
  if (sum_of_codes) *sum_of_codes = total;
  return step + sum(poison);
}

struct QuantizedRows {
  int8_t* codes;
  float *steps, *sums;  // one for each block of a row
  long stride, blocks;
};

inline QuantizedRows quantize_blocks(const MatmulArgs& a, int first, int rows) {
  QuantizedRows q;
  q.blocks = (a.in + kBlock - 1) / kBlock;
  q.stride = q.blocks * kBlock;
  q.codes = scratch_of<int8_t>(kQuantized, q.stride * rows);
  q.steps = scratch_of<float>(kScales, 2 * q.blocks * rows);
  q.sums = q.steps + q.blocks * rows;
  over_rows(rows, a.in, [&](int from, int to) {
    for (int r = from; r < to; ++r)
      for (long b = 0; b < q.blocks; ++b)
        with_type(a.x.type, [&](auto t) {
          int32_t total;
          int n = smaller(kBlock, a.in - int(b) * kBlock);
          const auto* x = row<decltype(t)>(a.x, first + r) + b * kBlock;
          q.steps[r * q.blocks + b] = quantize_stretch(x, n, q.codes + r * q.stride + b * kBlock, kBlock, &total);
          q.sums[r * q.blocks + b] = float(total);
        });
  });
  return q;
}

// R rows by one strip of int4: each block's integer sum, less zero * sum(x), times both scales.
template <int R, class S>
inline void int4_rows(const MatmulArgs& a, const QuantizedRows& q, int r0, int first, int strip) {
  const int groups = (a.in + a.group - 1) / a.group, per_group = larger(1, a.group / kBlock);
  const uint8_t* w = static_cast<const uint8_t*>(a.weight) + strip * q.blocks * kBlockBytes;
  const S* scale = static_cast<const S*>(a.scale) + long(strip) * groups * kStrip;
  const S* zeros = a.zero ? static_cast<const S*>(a.zero) + long(strip) * groups * kStrip : nullptr;
  F acc[R][kVecs];
  for (auto& r : acc) for (auto& t : r) t = zero();
  long at = 0;  // of the block's scales
  for (long b = 0, left = per_group; b < q.blocks; ++b, --left, w += kBlockBytes) {
    if (left == 0 && at + kStrip < long(groups) * kStrip) at += kStrip, left = per_group;
    for (int v = 0; v < kVecs; ++v) {
      do_not_hoist();  // else the broadcasts of x are made once for all v, which needs more registers than there are
      B codes[8];
      for (int j = 0; j < 4; ++j) {
        B both = load_bytes(w + 16 * W * v + 4 * W * j);
        codes[j] = low_nibbles(both);
        codes[j + 4] = high_nibbles(both);
      }
      const F s = load(scale + at + v * W), z = zeros ? load(zeros + at + v * W) : zero();
      for (int r = 0; r < R; ++r) {
        const long block = long(r0 + r) * q.blocks + b;
        F d = to_float(dot_block_u4(codes, q.codes + (r0 + r) * q.stride + b * kBlock));
        d = sub(d, mul(z, set(q.sums[block])));
        acc[r][v] = fma(d, mul(s, set(q.steps[block])), acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r) finish(a, first + r0 + r, strip, acc[r]);
}

constexpr int kIntTaskRows = 48;  // rows of a task

template <class Kernel>
inline void over_tiles(int out, int rows, Kernel kernel) {
  const int strips = (out + kStrip - 1) / kStrip, blocks = (rows + kIntTaskRows - 1) / kIntTaskRows;
  auto task = [&](int i) {
    int strip = i / blocks, last = smaller(rows, (i % blocks + 1) * kIntTaskRows);
    for (int r = i % blocks * kIntTaskRows; r < last; r += kDotRows)
      with_constant<kDotRows>(smaller(kDotRows, last - r), [&](auto n) { kernel(n, r, strip); });
  };
  parallel(strips * blocks, task);
}

inline void int4_matmul(const MatmulArgs& a) {
  for (int first = 0; first < a.rows; first += kPanelRows) {
    const int rows = smaller(kPanelRows, a.rows - first);
    const QuantizedRows q = quantize_blocks(a, first, rows);
    over_tiles(a.out, rows, [&](auto n, int r, int strip) {
      if (a.scale_type == kFloat16) int4_rows<decltype(n)::value, f16>(a, q, r, first, strip);
      else int4_rows<decltype(n)::value, float>(a, q, r, first, strip);
    });
  }
}

// R rows by one strip of int8, one scale a column and one step a row.
template <int R>
inline void int8_rows(const MatmulArgs& a, const QuantizedRows& q, int r0, int first, int strip) {
  const int quads = (a.in + 3) / 4;
  const uint8_t* w = static_cast<const uint8_t*>(a.weight) + long(strip) * quads * 4 * kStrip;
  I acc[R][kVecs];
  for (auto& r : acc) for (auto& t : r) t = izero();
  for (int k = 0; k < quads; ++k, w += 4 * kStrip)
    for (int v = 0; v < kVecs; ++v) {
      B codes = load_bytes(w + 4 * W * v);
      for (int r = 0; r < R; ++r) acc[r][v] = dot_s8(acc[r][v], codes, q.codes + (r0 + r) * q.stride + 4 * k);
    }
  for (int r = 0; r < R; ++r) {
    F total[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      int32_t lanes[W];
      store(lanes, acc[r][v]);
      float exact[W], scale[W];
      for (int i = 0; i < W; ++i) exact[i] = float(lanes[i] - kDotBias * a.sums[strip * kStrip + v * W + i]);
      const long at = long(strip) * kStrip + v * W;
      store(scale, a.scale_type == kFloat16 ? load(static_cast<const f16*>(a.scale) + at) : load(static_cast<const float*>(a.scale) + at));
      total[v] = mul(load(exact), mul(load(scale), set(q.steps[r0 + r])));
    }
    finish(a, first + r0 + r, strip, total);
  }
}

inline void int8_matmul(const MatmulArgs& a) {
  for (int first = 0; first < a.rows; first += kPanelRows) {
    const int rows = smaller(kPanelRows, a.rows - first);
    QuantizedRows q{};
    q.stride = round_up(a.in, 4);
    q.codes = scratch_of<int8_t>(kQuantized, q.stride * rows);
    q.steps = scratch_of<float>(kScales, rows);
    over_rows(rows, a.in, [&](int from, int to) {
      for (int r = from; r < to; ++r) {
        int8_t* codes = q.codes + r * q.stride;
        with_type(a.x.type, [&](auto t) {
          q.steps[r] = quantize_stretch(row<decltype(t)>(a.x, first + r), a.in, codes, int(q.stride), nullptr);
        });
        if (kDotBias) for (long k = 0; k < q.stride; ++k) codes[k] = int8_t(codes[k] ^ 0x80);
      }
    });
    over_tiles(a.out, rows, [&](auto n, int r, int strip) { int8_rows<decltype(n)::value>(a, q, r, first, strip); });
  }
}

// The panel of each strip of a scaled weight.
template <template <class> class Panel, class S>
inline auto scaled_panels(const MatmulArgs& a, long strip_bytes) {
  const int groups = (a.in + a.group - 1) / a.group;
  return [&a, strip_bytes, groups](int strip) {
    const long at = long(strip) * groups * kStrip;
    const S* zeros = a.zero ? static_cast<const S*>(a.zero) + at : nullptr;
    return Panel<S>{static_cast<const uint8_t*>(a.weight) + strip * strip_bytes,
                    {static_cast<const S*>(a.scale) + at, zeros, a.group}};
  };
}

inline void matmul(const MatmulArgs& a) {
  const bool half = a.scale_type == kFloat16;
  if (a.kind == kDense) {
    dense_matmul(a);
  } else if (a.kind == kInt8) {
    const long bytes = round_up(a.in, 4) * kStrip;
    if (a.rounds()) int8_matmul(a);
    else if (half) float_matmul(a, scaled_panels<Int8Panel, f16>(a, bytes));
    else float_matmul(a, scaled_panels<Int8Panel, float>(a, bytes));
  } else {
    const long bytes = (a.in + kBlock - 1) / kBlock * kBlockBytes;
    if (a.rounds()) int4_matmul(a);
    else if (half) float_matmul(a, scaled_panels<Int4Panel, f16>(a, bytes));
    else float_matmul(a, scaled_panels<Int4Panel, float>(a, bytes));
  }
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
