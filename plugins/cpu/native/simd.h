// Vectors of float and int32 lanes, and four-byte dot products, for each instruction set: the only file with intrinsics.
// Everything lives in a namespace of the variant's own, because the same templates are compiled several times with
// different flags, and the linker would otherwise keep one copy of them for all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(QIAO_EMULATED)
#include "emulate_x86.h"
#if defined(QIAO_AMX)
#include "emulate_amx.h"
#endif
#elif defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#if defined(QIAO_SIMD_SVE)
#include <arm_sve.h>
#else
#include <arm_neon.h>
#endif
#endif

#ifndef QIAO_VARIANT
#error "compile variant.cpp with -DQIAO_VARIANT=name"
#endif

namespace qiao {
namespace QIAO_VARIANT {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

#if defined(QIAO_SIMD_AVX512)
#include "simd_avx512.inc"
#elif defined(QIAO_SIMD_AVX2)
#include "simd_avx2.inc"
#elif defined(QIAO_SIMD_SVE)
#include "simd_sve.inc"
#elif defined(QIAO_SIMD_NEON)
#include "simd_neon.inc"
#else
#include "simd_scalar.inc"
#endif

// A strip is the unit of packed weights: kStrip columns, kVecs vectors wide. kRows is how many rows a kernel keeps in
// registers beside one strip of float weights, kDotRows beside one of quantized ones.
constexpr int kStrip = W * kVecs;

// The largest code of activations beside int8 weights: a block of 32 products with 16-bit codes stays far below 2^31.
constexpr int kFinest = kPartBytes == 2 ? 32767 : 127;

inline constexpr int smaller(int a, int b) { return a < b ? a : b; }
inline constexpr int larger(int a, int b) { return a > b ? a : b; }
inline constexpr long round_up(long n, long step) { return (n + step - 1) / step * step; }

// The first n lanes, the others zero.
template <class T>
inline F load_n(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  for (int i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}

template <class T>
inline void store_n(T* p, F v, int n) {
  if (n >= W) return store(p, v);
  T part[W];
  store(part, v);
  for (int i = 0; i < n; ++i) p[i] = part[i];
}

// To the nearest number of an element type, as float.
inline F rounded(F x, float) { return x; }
inline F rounded(F x, bf16) { return round_bf16(x); }
inline F rounded(F x, f16) {
  f16 part[W];
  store(part, x);
  return load(part);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// e^x to about 1 ulp by Cephes' polynomial (expf.c); 0 below the smallest normal result, NaN stays NaN.
inline F exp(F x) {
  const F low = set(-87.33654f);
  F y = min(set(88.37626f), max(low, x));
  F n = round(mul(y, set(1.44269504f)));
  F r = fma(n, set(-0.693359375f), y);
  r = fma(n, set(2.12194440e-4f), r);
  F p = set(1.9875691500e-4f);
  p = fma(p, r, set(1.3981999507e-3f));
  p = fma(p, r, set(8.3334519073e-3f));
  p = fma(p, r, set(4.1665795894e-2f));
  p = fma(p, r, set(1.6666665459e-1f));
  p = fma(p, r, set(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), set(1.0f));
  return keep_unless_less(scale_by_power(p, n), x, low);
}

// tanh x = 1 - 2 / (e^2x + 1)
inline F tanh(F x) { return sub(set(1.0f), div(set(2.0f), add(exp(add(x, x)), set(1.0f)))); }

}  // namespace QIAO_VARIANT
}  // namespace qiao
