// Writing keys and values to the cache, and copying its blocks.
#pragma once
#include "rows.h"

namespace qiao {
namespace QIAO_VARIANT {

template <class T>
inline T* head_of(const Heads& h, long token, long head) {
  return static_cast<T*>(h.data) + token * h.token + head * h.head;
}

template <class From, class To>
inline void write_vectors(const Cache& c, const From* key, const From* value, long block, long offset, int head) {
  To* k = static_cast<To*>(c.key) + block * c.key_block + head * c.key_head + offset;
  To* v = static_cast<To*>(c.value) + block * c.value_block + head * c.value_head + offset * c.value_token;
  To lanes[W];
  for (int d = 0; d < c.size; d += W) {
    const int n = smaller(W, c.size - d);
    store(lanes, load_n(key + d, n));
    for (int i = 0; i < n; ++i) k[(d + i) * c.key_dim] = lanes[i];
    store_n(v + d, load_n(value + d, n), n);
  }
}

// One head's vector to codes -127..127 at out[d * step]: x / scale rounded to the nearest, ties to even, with
// scale = max|x| / 127. A vector with a number that is not finite gets the scale NaN, which spoils its own sequence alone.
template <class From>
inline void write_codes(const From* x, int size, int8_t* out, long step, float* scale_out) {
  F most = zero(), faults = zero();
  for (int d = 0; d < size; d += W) {
    const F value = load_n(x + d, size - d);
    most = max(abs(value), most);
    faults = add(faults, sub(value, value));
  }
  const float scale = highest(most) / 127.0f + sum(faults);
  *scale_out = scale;
  const bool usable = scale > 0;
  int32_t codes[W];
  for (int d = 0; d < size; d += W) {
    const int n = smaller(W, size - d);
    const F ratio = usable ? div(load_n(x + d, n), set(scale)) : zero();
    store(codes, to_int(max(set(-127.0f), min(set(127.0f), round(ratio)))));
    for (int i = 0; i < n; ++i) out[(d + i) * step] = int8_t(codes[i]);
  }
}

template <class From>
inline void write_vectors8(const Cache& c, const From* key, const From* value, long block, long offset, int head) {
  const long scale = block * c.scale_block + head * c.scale_head + offset;
  write_codes(key, c.size, static_cast<int8_t*>(c.key) + block * c.key_block + head * c.key_head + offset, c.key_dim, c.key_scale + scale);
  write_codes(value, c.size, static_cast<int8_t*>(c.value) + block * c.value_block + head * c.value_head + offset * c.value_token, 1, c.value_scale + scale);
}

inline void write_token(const Heads& key, const Heads& value, const Cache& c, int64_t slot, int token) {
  if (slot < 0) return;
  for (int h = 0; h < c.heads; ++h)
    with_type(key.type, [&](auto from) {
      const auto *k = head_of<decltype(from)>(key, token, h), *v = head_of<decltype(from)>(value, token, h);
      const long block = slot / c.block, offset = slot % c.block;
      if (c.type == kSigned8) return write_vectors8(c, k, v, block, offset, h);
      with_type(c.type, [&](auto to) { write_vectors<decltype(from), decltype(to)>(c, k, v, block, offset, h); });
    });
}

inline void write(const Heads& key, const Heads& value, const Cache& c, const int64_t* slots, int tokens) {
  over_rows(tokens, 4L * c.heads * c.size, [&](int first, int last) {
    for (int t = first; t < last; ++t) write_token(key, value, c, slots[t], t);
  });
}

inline void copy_blocks(const Cache& c, const int64_t* from, const int64_t* to, int count, long key_bytes, long value_bytes) {
  const long scales = c.scale_block;
  auto task = [&](int i) {
    if (c.type == kSigned8) {
      memcpy(c.key_scale + to[i] * scales, c.key_scale + from[i] * scales, sizeof(float) * scales);
      memcpy(c.value_scale + to[i] * scales, c.value_scale + from[i] * scales, sizeof(float) * scales);
    }
    memcpy(static_cast<char*>(c.key) + to[i] * key_bytes, static_cast<char*>(c.key) + from[i] * key_bytes, key_bytes);
    memcpy(static_cast<char*>(c.value) + to[i] * value_bytes, static_cast<char*>(c.value) + from[i] * value_bytes, value_bytes);
  };
  parallel(count, task);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
