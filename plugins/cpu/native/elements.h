// Moving and combining elements by strides, for what models do outside the operators; small work, the same code for each
// instruction set. Sizes and strides count elements unless they say bytes; a stride of 0 repeats.
#pragma once
#include <cstdint>

namespace qiao {

struct Copy {  // [a][b][bytes], strides in bytes
  const char* from;
  long from_a, from_b;
  char* to;
  long to_a, to_b;
  int a, b;
  long bytes;
};
void copy(const Copy& c);

// out[r][i] = x[r][ids[i]], elements of `bytes` bytes, x_stride in bytes. Throws std::out_of_range.
void gather_columns(const char* x, long x_stride, int x_columns, const int64_t* ids, int columns, char* out, int rows, int bytes);

// n bytes, signed or not, as float32.
void widen_bytes(const void* x, bool is_signed, float* out, long n);

enum Operation : int { kAdd = 0, kSubtract = 1, kMultiply = 2 };
struct Combine {  // out[i][j][k] = x op y, out without gaps
  int operation;
  const float *x, *y;
  float* out;
  long size[3], x_stride[3], y_stride[3];
};
void combine(const Combine& c);

}  // namespace qiao
