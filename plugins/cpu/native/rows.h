// Reading and writing rows of any element type as float vectors.
#pragma once
#include "kernels.h"
#include "pool.h"
#include "simd.h"

namespace qiao {
namespace QIAO_VARIANT {

// Calls function(T{}) with the element type that `type` names.
template <class Function>
inline void with_type(int type, Function&& function) {
  if (type == kFloat32) function(float{});
  else if (type == kBFloat16) function(bf16{});
  else function(f16{});
}

// As with_type, for what a cache may hold.
template <class Function>
inline void with_cache_type(int type, Function&& function) {
  if (type == kSigned8) function(int8_t{});
  else with_type(type, function);
}

// Calls function with a constant of the run-time value n, 1 <= n <= Most.
template <int N> struct Constant { static constexpr int value = N; };
template <int Most, class Function>
inline void with_constant(int n, Function&& function) {
  if constexpr (Most > 1) {
    if (n < Most) return with_constant<Most - 1>(n, function);
  }
  function(Constant<Most>{});
}

// Calls function with the constants 0..N-1: a loop that is unrolled for sure, so that arrays it indexes stay in registers.
#define QIAO_INLINE __attribute__((always_inline))
template <int N, class Function>
QIAO_INLINE inline void each(Function&& function) {
  if constexpr (N > 0) {
    each<N - 1>(function);
    function(Constant<N - 1>{});
  }
}

template <class T>
inline T* row(const Rows& rows, long index) {
  return static_cast<T*>(rows.data) + index * rows.stride;
}

template <class T>
inline void widen_row(const T* from, float* to, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
}

// Runs function(first, last) over ranges of rows, on several threads where there is enough work.
template <class Function>
inline void over_rows(int count, long work_per_row, Function&& function) {
  const long least = 16384;  // elements a task, below which waking a thread costs more than it brings
  int per_task = larger(1, int((least + work_per_row - 1) / larger(1, int(work_per_row))));
  int tasks = (count + per_task - 1) / per_task;
  auto task = [&](int i) { function(i * per_task, smaller(count, (i + 1) * per_task)); };
  parallel(tasks, task);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
