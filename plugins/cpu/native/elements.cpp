#include "elements.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.h"

namespace qiao {
namespace {

// Runs function(i) for each i < count, several to a task where each is little work.
template <class Function>
void spread(long count, long work, Function function) {
  const long per_task = std::max(1L, 65536 / std::max(1L, work));
  auto task = [=](int t) {
    for (long i = t * per_task; i < std::min(count, (t + 1) * per_task); ++i) function(i);
  };
  parallel(int((count + per_task - 1) / per_task), task);
}

template <class Function>
void combine_with(const Combine& c, Function function) {
  spread(c.size[0], c.size[1] * c.size[2], [=](long i) {
    for (long j = 0; j < c.size[1]; ++j) {
      const float* x = c.x + i * c.x_stride[0] + j * c.x_stride[1];
      const float* y = c.y + i * c.y_stride[0] + j * c.y_stride[1];
      float* out = c.out + (i * c.size[1] + j) * c.size[2];
      for (long k = 0; k < c.size[2]; ++k) out[k] = function(x[k * c.x_stride[2]], y[k * c.y_stride[2]]);
    }
  });
}

template <class T>
void widen(const T* x, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = float(x[i]);
}

}  // namespace

void copy(const Copy& c) {
  spread(c.a, c.b * c.bytes, [=](long i) {
    for (int j = 0; j < c.b; ++j) memcpy(c.to + i * c.to_a + j * c.to_b, c.from + i * c.from_a + j * c.from_b, c.bytes);
  });
}

void gather_columns(const char* x, long x_stride, int x_columns, const int64_t* ids, int columns, char* out, int rows, int bytes) {
  for (int i = 0; i < columns; ++i)
    if (ids[i] < 0 || ids[i] >= x_columns) throw std::out_of_range("column");
  spread(rows, long(columns) * bytes, [=](long r) {
    for (int i = 0; i < columns; ++i) memcpy(out + (r * columns + i) * bytes, x + r * x_stride + ids[i] * bytes, bytes);
  });
}

void widen_bytes(const void* x, bool is_signed, float* out, long n) {
  if (is_signed) widen(static_cast<const int8_t*>(x), out, n);
  else widen(static_cast<const uint8_t*>(x), out, n);
}

void combine(const Combine& c) {
  if (c.operation == kAdd) combine_with(c, [](float a, float b) { return a + b; });
  else if (c.operation == kSubtract) combine_with(c, [](float a, float b) { return a - b; });
  else combine_with(c, [](float a, float b) { return a * b; });
}

}  // namespace qiao
