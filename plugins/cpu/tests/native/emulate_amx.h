// AMX's tiles in plain C++, after the operation sections of Intel's manual (LDTILECFG, TILELOADD, TDPBSSD, TDPBF16PS), for
// tests on processors without them.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace qiao_emulated {

struct Tiles {
  uint8_t data[8][16][64];
  uint16_t bytes[8];
  uint8_t rows[8];
  bool on;
};
inline thread_local Tiles tiles = {};

inline void need(bool good) {
  if (good) return;
  fprintf(stderr, "AMX would raise #UD here\n");
  abort();
}

inline void tile_loadconfig(const void* p) {
  const uint8_t* c = static_cast<const uint8_t*>(p);
  need(c[0] == 1 && c[1] == 0);
  tiles = {};
  tiles.on = true;
  for (int t = 0; t < 8; ++t) {
    memcpy(&tiles.bytes[t], c + 16 + 2 * t, 2);
    tiles.rows[t] = c[48 + t];
    need(tiles.bytes[t] <= 64 && tiles.rows[t] <= 16 && !tiles.bytes[t] == !tiles.rows[t]);
  }
}
inline void tile_release() { tiles = {}; }
inline void tile_zero(int t) {
  need(tiles.on && tiles.rows[t]);
  memset(tiles.data[t], 0, sizeof tiles.data[t]);
}
inline void tile_loadd(int t, const void* p, long stride) {
  tile_zero(t);
  for (int r = 0; r < tiles.rows[t]; ++r) memcpy(tiles.data[t][r], static_cast<const char*>(p) + r * stride, tiles.bytes[t]);
}
inline void tile_stored(int t, void* p, long stride) {
  need(tiles.on && tiles.rows[t]);
  for (int r = 0; r < tiles.rows[t]; ++r) memcpy(static_cast<char*>(p) + r * stride, tiles.data[t][r], tiles.bytes[t]);
}

// Calls product(sum, quad of a, quad of b) for each sum of c and each of its groups of four bytes, in the manual's order.
template <class Product>
void dot(int c, int a, int b, Product product) {
  need(tiles.on && tiles.rows[c] == tiles.rows[a] && tiles.bytes[c] == tiles.bytes[b] && tiles.bytes[a] == 4 * tiles.rows[b]);
  for (int m = 0; m < tiles.rows[c]; ++m)
    for (int k = 0; k < tiles.bytes[a] / 4; ++k)
      for (int n = 0; n < tiles.bytes[c] / 4; ++n) product(&tiles.data[c][m][4 * n], &tiles.data[a][m][4 * k], &tiles.data[b][k][4 * n]);
  memset(tiles.data[c] + tiles.rows[c], 0, 64 * (16 - tiles.rows[c]));
}

inline void tile_dpbssd(int c, int a, int b) {
  dot(c, a, b, [](uint8_t* sum, const uint8_t* x, const uint8_t* y) {
    int32_t total;
    memcpy(&total, sum, 4);
    for (int i = 0; i < 4; ++i) total = int32_t(uint32_t(total) + uint32_t(int8_t(x[i]) * int8_t(y[i])));
    memcpy(sum, &total, 4);
  });
}

// Denormals count as zero, coming and going; both products of a pair are added one after the other, each fused.
inline float flushed(float x) { return __builtin_fabsf(x) < 1.17549435e-38f ? 0.0f : x; }
inline void tile_dpbf16ps(int c, int a, int b) {
  dot(c, a, b, [](uint8_t* sum, const uint8_t* x, const uint8_t* y) {
    float total, p[2], q[2];
    memcpy(&total, sum, 4);
    for (int i = 0; i < 2; ++i) {
      const uint32_t u = uint32_t(x[2 * i] | x[2 * i + 1] << 8) << 16, v = uint32_t(y[2 * i] | y[2 * i + 1] << 8) << 16;
      memcpy(&p[i], &u, 4);
      memcpy(&q[i], &v, 4);
      total = flushed(__builtin_fmaf(flushed(p[i]), flushed(q[i]), flushed(total)));
    }
    memcpy(sum, &total, 4);
  });
}

}  // namespace qiao_emulated

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig qiao_emulated::tile_loadconfig
#define _tile_release qiao_emulated::tile_release
#define _tile_zero qiao_emulated::tile_zero
#define _tile_loadd qiao_emulated::tile_loadd
#define _tile_stored qiao_emulated::tile_stored
#define _tile_dpbssd qiao_emulated::tile_dpbssd
#define _tile_dpbf16ps qiao_emulated::tile_dpbf16ps
