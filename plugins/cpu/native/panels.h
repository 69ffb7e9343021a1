// The forms of a packed weight: each gives the float values of one k of a strip, exactly as the contract defines them.
// `stop` and `segment` bound the stretch of k over which the scales stay the same.
#pragma once
#include "rows.h"

namespace qiao {
namespace QIAO_VARIANT {

// Bytes ahead of its reading at which a weight is asked for: the processor's own prefetching stops at page ends.
constexpr long kAhead = 1536;

constexpr int kBlock = 32;                    // k of one block of int8 and int4
constexpr long kBlockBytes = 16L * kStrip;    // bytes of a block of int4 in a strip

template <class T>
struct DensePanel {
  const T* base;
  long ahead = kAhead;
  struct Segment {};
  int stop(int, int end) const { return end; }
  Segment segment(int) const { return {}; }
  void load_k(int k, const Segment&, F* out) const {
    const T* p = base + long(k) * kStrip;
    __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead, 0, sizeof(T) == 4 ? 2 : 3);  // two float stretches fill a cache
    for (int v = 0; v < kVecs; ++v) out[v] = load(p + v * W);
  }
};

// bfloat16 in pairs of neighbouring k, [k / 2][column][2]: two floats of a column come out of one word without shuffles,
// and instructions that multiply pairs find their operands. An odd last k is paired with zeros. X: the form of the rows that
// it is multiplied with, float or, where there are such instructions, bf16.
template <class X>
struct PairPanel {
  const bf16* base;
  long ahead = kAhead;
  struct Segment {};
  int stop(int, int end) const { return end; }
  Segment segment(int) const { return {}; }
  const bf16* pairs(int k) const { return base + long(k) * kStrip; }  // k is even
  void ask_ahead(int k) const {
    const char* p = reinterpret_cast<const char*>(pairs(k)) + ahead;
    for (int i = 0; i < 4 * kStrip; i += 64) __builtin_prefetch(p + i);
  }
  // half: 0 for the values of k, 1 for those of k + 1.
  template <bool Tight>
  void load_half(int k, int half, F* out) const {
    const bf16* p = pairs(k);
    if (half == 0) ask_ahead(k);
    for (int v = 0; v < kVecs; ++v) {
      if (half == 0) out[v] = low_bf16(load_bytes(p + 2 * W * v));
      else if (Tight) out[v] = high_bf16_tight(p + 2 * W * v);
      else out[v] = high_bf16(load_bytes(p + 2 * W * v));
    }
  }
};

// How many k make a step of a panel's layout: loops over k go by as many.
template <class P> constexpr int kStepOf = 1;
template <class X> constexpr int kStepOf<PairPanel<X>> = 2;

// Scales and zeros of one strip, S float or f16.
template <class S>
struct Groups {
  const S *scale, *zero;
  float all_zeros;  // where zero is null
  int size;
  struct Segment { F scale[kVecs], zero[kVecs]; };
  int stop(int k, int end) const { return smaller(end, (k / size + 1) * size); }
  Segment segment(int k) const {
    Segment out;
    long at = long(k / size) * kStrip;
    for (int v = 0; v < kVecs; ++v) {
      out.scale[v] = load(scale + at + v * W);
      out.zero[v] = zero ? load(zero + at + v * W) : set(all_zeros);
    }
    return out;
  }
};

inline F dequantize(I code, F zero, F scale) { return mul(sub(to_float(code), zero), scale); }

template <class S>
struct ScaledPanel {
  const uint8_t* base;
  Groups<S> groups;
  using Segment = typename Groups<S>::Segment;
  int stop(int k, int end) const { return groups.stop(k, end); }
  Segment segment(int k) const { return groups.segment(k); }
};

template <class S>
struct Int8Panel : ScaledPanel<S> {
  void load_k(int k, const typename Groups<S>::Segment& s, F* out) const {
    const uint8_t* p = this->base + long(k / 4) * 4 * kStrip;
    for (int v = 0; v < kVecs; ++v) out[v] = dequantize(signed_byte(load_bytes(p + 4 * W * v), k % 4), s.zero[v], s.scale[v]);
  }
};

template <class S>
struct Int4Panel : ScaledPanel<S> {
  void load_k(int k, const typename Groups<S>::Segment& s, F* out) const {
    const int quad = k % kBlock / 4, shift = 8 * (k % 4) + (quad >= 4 ? 4 : 0);
    const uint8_t* p = this->base + k / kBlock * kBlockBytes + 4 * W * (quad % 4);
    for (int v = 0; v < kVecs; ++v)
      out[v] = dequantize(unsigned_field(load_bytes(p + 16 * W * v), shift, 15), s.zero[v], s.scale[v]);
  }
};

// Writes rows x columns as [strip][column of the matrix / Together][row in the strip][Together], filled up with zeros to a
// multiple of `unit` columns.
template <int Together, class T>
inline void transpose_to_strips(const T* from, T* to, int rows, int columns, int unit = Together) {
  const long wide = round_up(columns, unit), size = wide * kStrip;
  auto task = [=](int strip) {
    T* out = to + strip * size;
    for (int c = 0; c < kStrip; ++c) {
      const int n = strip * kStrip + c;
      for (int k = 0; k < wide; ++k)
        out[(long(k / Together) * kStrip + c) * Together + k % Together] = n < rows && k < columns ? from[long(n) * columns + k] : T{};
    }
  };
  parallel((rows + kStrip - 1) / kStrip, task);
}

inline void pack_dense(const void* from, void* to, int rows, int columns, int type) {
  if (type == kFloat32) transpose_to_strips<1>(static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), rows, columns);
  else if (type == kFloat16) transpose_to_strips<1>(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), rows, columns);
  else transpose_to_strips<2>(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), rows, columns);
}

inline void pack_int8(const int8_t* from, void* to, int rows, int columns) {
  transpose_to_strips<4>(from, static_cast<int8_t*>(to), rows, columns, kBlock);
}

inline void pack_int4(const uint8_t* from, void* to, int rows, int columns) {
  int blocks = (columns + kBlock - 1) / kBlock;
  auto task = [=](int strip) {
    uint8_t* out = static_cast<uint8_t*>(to) + long(strip) * blocks * kBlockBytes;
    for (int b = 0; b < blocks; ++b, out += kBlockBytes)
      for (int c = 0; c < kStrip; ++c)
        for (int i = 0; i < kBlock / 2; ++i) {
          int n = strip * kStrip + c, low = b * kBlock + i, high = low + kBlock / 2;
          int a = n < rows && low < columns ? from[long(n) * columns + low] & 15 : 0;
          int z = n < rows && high < columns ? from[long(n) * columns + high] & 15 : 0;
          out[16 * W * (c / W) + 4 * W * (i / 4) + 4 * (c % W) + i % 4] = uint8_t(a | z << 4);
        }
  };
  parallel((rows + kStrip - 1) / kStrip, task);
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
