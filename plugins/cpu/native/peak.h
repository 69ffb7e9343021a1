// What this processor can do at most, as measures for the other kernels: benchmarks time these.
#pragma once
#include "rows.h"

namespace qiao {
namespace QIAO_VARIANT {

// Every thread reads its part of `bytes` once.
inline void read_all(const void* memory, long bytes) {
  constexpr long step = 8 * W;
  const long floats = bytes / long(sizeof(float)) / step * step, parts = threads();
  auto task = [=](int i) {
    const float *p = static_cast<const float*>(memory) + floats / step * i / parts * step,
                *end = static_cast<const float*>(memory) + floats / step * (i + 1) / parts * step;
    F most[8];
    for (auto& m : most) m = zero();
    for (; p < end; p += step) {
      for (int v = 0; v < 8; ++v) most[v] = max(load(p + v * W), most[v]);
      for (int line = 0; line < step; line += 16) __builtin_prefetch(p + line + 512);
    }
    for (int v = 1; v < 8; ++v) most[0] = max(most[v], most[0]);
    volatile float kept = highest(most[0]);
    (void)kept;
  };
  parallel(int(parts), task);
}

// Every thread does `rounds` times 12 vectors of multiply-adds that do not wait for each other.
inline void multiply_add_all(long rounds) {
  auto task = [=](int) {
    F sums[12];
    for (int j = 0; j < 12; ++j) sums[j] = set(float(j));
    F factor = set(0.999f);
    for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (auto& s : sums) s = fma(s, factor, factor);
    }
    for (int j = 1; j < 12; ++j) sums[0] = add(sums[0], sums[j]);
    volatile float kept = sum(sums[0]);
    (void)kept;
  };
  parallel(threads(), task);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
