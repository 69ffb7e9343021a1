// The table of operators that each instruction set fills, and their arguments: plain pointers, sizes and strides, all
// strides in elements. Letters as in qiao.contract.types. Every result row depends on its own row's inputs alone.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qiao {

enum Type : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kSigned8 = 3 };  // kSigned8: of a cache only

struct Rows {  // rows of one type, the last dimension contiguous
  void* data;
  long stride;
  int type;
};

struct Heads {  // [T, heads, D] with D contiguous
  void* data;
  long token, head;
  int type;
};

// Keys lie transposed inside a block: [block][head][D][tokens padded], so that a vector holds neighbouring tokens and
// scores need no sums across lanes. Values are [block][head][token][D padded]. A cache of kSigned8 has a scale for each
// token and head, [block][head][token]: the vector is its codes -127..127 times that.
struct Cache {
  void *key, *value;
  int type, heads, size, block;   // size: D; block: tokens of a block
  long key_block, key_head, key_dim;
  long value_block, value_head, value_token;
  float *key_scale, *value_scale;
  long scale_block, scale_head;
};

enum Weight : int { kDense = 0, kInt8 = 1, kInt4 = 2 };

// A packed weight: strips of kStrip columns. Dense [strip][k][column], but bfloat16
// [strip][k / 2][column][2] with zeros for the partner of an odd last k; int8 and int4 by
// blocks of 32 k, filled up with zeros: int8 [strip][block][8][column][4]; int4 [strip][block][vector][4][column][4], low
// nibbles k 0..15 of the block and high nibbles k 16..31. A weight's value is (code - zero) * scale.
// scale and zero: [strip][group][column] of scale_type; where zero is null, all_zeros stands for each of them.
struct PackedWeight {
  int in, out;
  int kind, type;      // Weight; for dense its Type
  const void *weight, *scale, *zero;
  int scale_type, group;
  int block;           // inputs that share a step of activations rounded to int8: 16, 32 (group is a multiple of it, or
                       // there is one group), -1 for all of a row (int8 without zeros); 0 where nothing is rounded
  int finest;          // the largest code of activations beside int8 weights, of what Kernels::finest allows; int4: 127
  int zero_is_scaled;  // zero holds zero * scale, for the rounded kernels alone
  float all_zeros;
};

struct MatmulArgs : PackedWeight {
  Rows x, y;
  int rows;
  Rows bias;           // data null where there is none
};

struct AttentionArgs {
  Heads query;
  Heads out;
  Cache cache;
  int heads, seqs;
  const int32_t *query_start, *lens, *tables;
  long table_width;
  float scale, soft_cap;
  int window;
};

struct RotaryArgs {
  Heads query, key, value;    // value.data null: rotate key in place; else store key and value in the cache
  int tokens, heads, kv_heads, size, rotated, interleaved;
  const float *cos, *sin;     // [T, rotated / 2]
  long cos_stride, sin_stride;
  Cache cache;
  const int64_t* slots;
};

struct Kernels {
  const char* name;
  int strip, lanes;
  int finest;  // 127, or 32767 where products of int8 weights with 16-bit activations cost no more
  void (*pack_dense)(const void* from, void* to, int rows, int columns, int type);
  void (*pack_int8)(const int8_t* from, void* to, int rows, int columns);
  void (*pack_int4)(const uint8_t* from, void* to, int rows, int columns);
  void (*matmul)(const MatmulArgs&);
  void (*attention)(const AttentionArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*write)(const Heads& key, const Heads& value, const Cache&, const int64_t* slots, int tokens);
  void (*copy_blocks)(const Cache&, const int64_t* from, const int64_t* to, int count, long key_bytes, long value_bytes);
  // out = norm(x + residual) and residual = x + residual; residual.data null: out = norm(x)
  void (*norm)(const Rows& x, const Rows& residual, const Rows& weight, const Rows& out, int rows, int size, float eps);
  void (*gated)(const Rows& x, const Rows& out, int rows, int size, int gelu);
  // Rows ids[i] of a table of table_rows rows, table_stride bytes apart, to a dense out. A row whose id is outside the
  // table becomes zeros; returns how many there were.
  int (*gather_rows)(const void* table, long table_rows, long table_stride, long row_bytes, const int64_t* ids, void* out,
                     int rows);
  // Element by element in float, rounded once to out's type: x, x * factor, x + y, cap * tanh(x / cap).
  void (*convert)(const Rows& x, const Rows& out, int rows, int size);
  void (*scale)(const Rows& x, float factor, const Rows& out, int rows, int size);
  void (*add)(const Rows& x, const Rows& y, const Rows& out, int rows, int size);
  void (*soft_cap)(const Rows& x, float cap, const Rows& out, int rows, int size);
  void (*argmax)(const float* logits, long stride, int64_t* out, int rows, int vocab);
  void (*weights_of_logits)(const float* logits, float highest, float temperature, float* out, int vocab);
  // For benchmarks: all threads together read bytes, each does 12 * lanes * rounds multiply-adds.
  void (*read_all)(const void* memory, long bytes);
  void (*multiply_add_all)(long rounds);
};

const Kernels* kernels_scalar();  // the others: variants.cpp

}  // namespace qiao
