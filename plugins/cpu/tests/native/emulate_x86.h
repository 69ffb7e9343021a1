// AVX-512 and AVX-VNNI on a processor that has AVX2 alone, for tests: SIMDe's portable intrinsics, and here those that its
// version 0.7.4 lacks, made of two halves of AVX2. An intrinsic that neither has fails to compile.
#pragma once
#include <immintrin.h>
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace qiao_emulated {

inline __m512 join(__m256 low, __m256 high) {
  __m512 out;
  memcpy(&out, &low, 32);
  memcpy(reinterpret_cast<char*>(&out) + 32, &high, 32);
  return out;
}
inline __m512i join(__m256i low, __m256i high) {
  __m512i out;
  memcpy(&out, &low, 32);
  memcpy(reinterpret_cast<char*>(&out) + 32, &high, 32);
  return out;
}
inline __m256i join(__m128i low, __m128i high) { return _mm256_set_m128i(high, low); }
inline __m256 half(const __m512& a, int which) {
  __m256 out;
  memcpy(&out, reinterpret_cast<const char*>(&a) + 32 * which, 32);
  return out;
}
inline __m256i half(const __m512i& a, int which) {
  __m256i out;
  memcpy(&out, reinterpret_cast<const char*>(&a) + 32 * which, 32);
  return out;
}
inline __m128i half(const __m256i& a, int which) { return which ? _mm256_extracti128_si256(a, 1) : _mm256_castsi256_si128(a); }

inline __m512i cvtps_epi32(__m512 a) { return join(_mm256_cvtps_epi32(half(a, 0)), _mm256_cvtps_epi32(half(a, 1))); }
inline __m512 cvtepi32_ps(__m512i a) { return join(_mm256_cvtepi32_ps(half(a, 0)), _mm256_cvtepi32_ps(half(a, 1))); }
inline __m512i cvtepu16_epi32(__m256i a) { return join(_mm256_cvtepu16_epi32(half(a, 0)), _mm256_cvtepu16_epi32(half(a, 1))); }
inline __m512i cvtepi8_epi32(__m128i a) {
  return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(a, a)));
}
inline __m512 cvtph_ps(__m256i a) { return join(_mm256_cvtph_ps(half(a, 0)), _mm256_cvtph_ps(half(a, 1))); }
inline __m256i cvtps_ph(__m512 a) { return join(_mm256_cvtps_ph(half(a, 0), 0), _mm256_cvtps_ph(half(a, 1), 0)); }
inline __m512i srai_epi32(__m512i a, unsigned n) {
  return join(_mm256_srai_epi32(half(a, 0), int(n)), _mm256_srai_epi32(half(a, 1), int(n)));
}
inline __m256i cvtepi32_epi16(__m512i a) {  // truncates
  int32_t wide[16];
  int16_t narrow[16];
  memcpy(wide, &a, 64);
  for (int i = 0; i < 16; ++i) narrow[i] = int16_t(wide[i]);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow));
}
inline __m128i cvtsepi32_epi8(__m512i a) {  // saturates
  int32_t wide[16];
  int8_t narrow[16];
  memcpy(wide, &a, 64);
  for (int i = 0; i < 16; ++i) narrow[i] = int8_t(wide[i] > 127 ? 127 : wide[i] < -128 ? -128 : wide[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(narrow));
}
inline float reduce_add_ps(__m512 a) {  // halves, then halves of those, as the compilers do
  float v[16];
  memcpy(v, &a, 64);
  for (int n = 8; n; n /= 2) for (int i = 0; i < n; ++i) v[i] += v[i + n];
  return v[0];
}
inline int32_t reduce_add_epi32(__m512i a) {
  uint32_t v[16];
  memcpy(v, &a, 64);
  for (int i = 1; i < 16; ++i) v[0] += v[i];
  return int32_t(v[0]);
}
inline float reduce_max_ps(__m512 a) {
  float v[16];
  memcpy(v, &a, 64);
  for (int i = 1; i < 16; ++i) v[0] = v[i] > v[0] ? v[i] : v[0];
  return v[0];
}

}  // namespace qiao_emulated

#undef _mm512_cvtps_ph
#define _mm512_cvtps_epi32 qiao_emulated::cvtps_epi32
#define _mm512_cvtepi32_ps qiao_emulated::cvtepi32_ps
#define _mm512_cvtepu16_epi32 qiao_emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 qiao_emulated::cvtepi8_epi32
#define _mm512_cvtph_ps qiao_emulated::cvtph_ps
#define _mm512_cvtps_ph(a, rounding) qiao_emulated::cvtps_ph(a)
#define _mm512_srai_epi32 qiao_emulated::srai_epi32
#define _mm512_cvtepi32_epi16 qiao_emulated::cvtepi32_epi16
#define _mm512_cvtsepi32_epi8 qiao_emulated::cvtsepi32_epi8
#define _mm512_reduce_add_ps qiao_emulated::reduce_add_ps
#define _mm512_reduce_add_epi32 qiao_emulated::reduce_add_epi32
#define _mm512_reduce_max_ps qiao_emulated::reduce_max_ps
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
