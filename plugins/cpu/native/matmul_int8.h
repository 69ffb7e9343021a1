// Linear layers on int8 activations. Activations are rounded in blocks that share a step; each block's product with the
// weight is an exact integer, and blocks are scaled and added in float in their order, whatever the number of rows.
#pragma once
#include "matmul.h"

namespace qiao {
namespace QIAO_VARIANT {

constexpr int kIntRows = kDotRows;   // rows of one tile of sums in registers
constexpr int kFewTiles = 2;          // up to so many tiles read the packed weight; more share one unpacking
constexpr int kUnpacked = 32;         // blocks that are unpacked at once: 16 KiB of bytes in the first-level cache
constexpr long kCodesInCache = 192L << 10;

// Rows as integers. Codes of four neighbouring inputs lie together, `stride` bytes a row.
struct RoundedRows {
  uint8_t* codes;
  float *steps, *less;  // [block][row]: the step, and -step * (sum of the codes), which a weight's zero point needs
  int32_t* sums;        // [block][row]: the sum of the codes; for int4 with a whole zero point -zero point * that
  long stride;
  int rows;
};

// What a zero point asks for: nothing, to be taken off the exact integers, or off the float sums.
enum class Shift { kNone, kWhole, kFloat };
inline Shift shift_of(const MatmulArgs& a) {
  if (a.zero) return Shift::kFloat;
  if (a.all_zeros == 0) return Shift::kNone;
  const bool code = a.kind == kInt4 && a.all_zeros > 0 && a.all_zeros < 16;
  return code && float(int(a.all_zeros)) == a.all_zeros ? Shift::kWhole : Shift::kFloat;
}

inline void store_codes(uint8_t* at, I code, bool parts) {
  if (parts) store_parts(at, code);
  else store_bytes(at, code);
}

// codes = round(x * (finest / max |x|)) of n values, zeros up to `padded`; step = max |x| / finest. NaN or infinity in x
// makes the step NaN, so that it is not lost. What is too small for finest / max |x| to be finite counts as zero.
template <class T>
inline void round_stretch(const T* x, int n, int padded, bool parts, float finest, uint8_t* codes, float* step, float* less, int32_t* sum_of_codes) {
  F most = zero(), poison = zero();
  for (int i = 0; i < n; i += W) {
    const F value = load_n(x + i, n - i);
    most = max(most, abs(value));
    poison = add(poison, sub(value, value));
  }
  const float peak = highest(most);
  const bool counts = peak > finest * 1e-37f;
  const F factor = set(counts ? finest / peak : 0.0f);
  const int bytes = parts ? kPartBytes : 1;
  I total = izero();
  for (int i = 0; i < padded; i += W) {
    const I code = i < n ? to_int(mul(load_n(x + i, n - i), factor)) : izero();
    store_codes(codes + i * bytes, code, parts);
    total = add(total, code);
  }
  *step = (counts ? peak / finest : 0.0f) + sum(poison);
  *sum_of_codes = sum(total);
  *less = -*step * float(*sum_of_codes);
}

// Rounds a panel of rows. int4 kernels read plain bytes, int8 kernels the form of store_parts.
inline RoundedRows round_rows(const MatmulArgs& a, int first, int rows) {
  const bool parts = a.kind == kInt8;
  const int32_t times = shift_of(a) == Shift::kWhole ? -int32_t(a.all_zeros) : 1;
  const float finest = float(parts ? smaller(a.finest, kFinest) : 127);
  const long padded = round_up(a.in, kBlock), block = a.block > 0 ? a.block : padded;
  RoundedRows q;
  const long blocks = padded / block;
  q.rows = rows;
  q.stride = round_up(padded * (parts ? kPartBytes : 1), 64) + 64;  // rows a power of two apart would share few cache sets
  q.codes = scratch_of<uint8_t>(kQuantized, q.stride * (rows + kReadRows - 1));
  q.steps = scratch_of<float>(kScales, 3 * blocks * rows);
  q.less = q.steps + blocks * rows;
  q.sums = reinterpret_cast<int32_t*>(q.less + blocks * rows);
  over_rows(rows, a.in, [&](int from, int to) {
    for (int r = from; r < to; ++r)
      with_type(a.x.type, [&](auto t) {
        const auto* x = row<decltype(t)>(a.x, first + r);
        uint8_t* codes = q.codes + r * q.stride;
        long at = r;
        for (long k = 0; k < padded; k += block, at += rows) {
          round_stretch(x + k, larger(0, smaller(int(block), a.in - int(k))), int(block), parts, finest,
                        codes + k * (parts ? kPartBytes : 1), q.steps + at, q.less + at, q.sums + at);
          q.sums[at] = int32_t(uint32_t(q.sums[at]) * uint32_t(times));  // of NaN the codes are any number
        }
      });
  });
  return q;
}

// Scales of one strip and its zero points times them, block after block.
class ScaleRows {
 public:
  ScaleRows(const MatmulArgs& a, int strip)
      : a_(a), at_(long(strip) * ((a.in + a.group - 1) / a.group) * kStrip), last_(at_ + long((a.in - 1) / a.group) * kStrip),
        per_group_(larger(1, a.group / larger(1, a.block))), left_(per_group_) {}
  Shift kind() const { return shift_of(a_); }
  void next(F* scale, F* shift) {
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = read(a_.scale, at_ + v * W);
      if (!a_.zero) shift[v] = mul(scale[v], set(a_.all_zeros));
      else shift[v] = a_.zero_is_scaled ? read(a_.zero, at_ + v * W) : mul(scale[v], read(a_.zero, at_ + v * W));
    }
    if (--left_ == 0) left_ = per_group_, at_ = at_ < last_ ? at_ + kStrip : at_;
  }

 private:
  F read(const void* p, long at) const {
    return a_.scale_type == kFloat16 ? load(static_cast<const f16*>(p) + at) : load(static_cast<const float*>(p) + at);
  }
  const MatmulArgs& a_;
  long at_, last_;
  int per_group_, left_;
};

// Scales already unpacked: [block][scale, shift][column].
struct WideScales {
  const float* at;
  Shift shift;
  Shift kind() const { return shift; }
  void next(F* scale, F* shift) {
    for (int v = 0; v < kVecs; ++v) scale[v] = load(at + v * W), shift[v] = load(at + kStrip + v * W);
    at += 2 * kStrip;
  }
};

// Forms of a strip's codes: one quad of one vector of columns, quads counted from the strip's begin.
struct PackedInt4 {
  const uint8_t* base;
  using Total = Short;
  static constexpr int kParts = 1;
  static constexpr bool kPlain = false;  // whether bytes lie as WideInt4 has them
  B quad(long block, int j, int v, int) const {
    const B both = load_bytes(base + block * kBlockBytes + 16 * W * v + 4 * W * (j % 4));
    return j < 4 ? low_nibbles(both) : high_nibbles(both);
  }
  static Total start(int32_t) { return no_short(); }
  static Total dot(Total acc, B w, B x) { return add_u4(acc, w, x); }
  void ahead(long block) const {
    for (long i = 0; i < kBlockBytes; i += 64) __builtin_prefetch(base + block * kBlockBytes + i + kAhead);
  }
};

struct WideInt4 : PackedInt4 {
  static constexpr bool kPlain = true;
  B quad(long block, int j, int v, int) const { return load_bytes(base + (block * 8 + j) * 4 * kStrip + 4 * W * v); }
  void ahead(long) const {}
};

struct PackedInt8 {
  const uint8_t* base;
  using Total = I;
  static constexpr int kParts = kInt8Parts;
  static constexpr bool kPlain = true;
  B quad(long block, int j, int v, int part) const {
    return part_of(load_bytes(base + (block * 8 + j) * 4 * kStrip + 4 * W * v), part);
  }
  static Total start(int32_t sum) { return start_s8(sum); }
  static Total dot(Total acc, B w, B x) { return add_s8(acc, w, x); }
  void ahead(long block) const {
    for (long i = 0; i < 32 * kStrip; i += 64) __builtin_prefetch(base + block * 32 * kStrip + i + kAhead);
  }
};

// acc[r][v] += R rows' codes at x times quads `from` to `from` + Q - 1 of a block, by dot products of four bytes.
template <int R, int Q, class Weights>
inline __attribute__((always_inline)) void add_dots(const Weights& w, long block, int from, const uint8_t* x, long stride,
                                                     typename Weights::Total (&acc)[R][kVecs]) {
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 2
    for (int p = 0; p < Weights::kParts; ++p) {
      B codes[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) codes[v] = w.quad(block, from + j, v, p);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const B value = spread(x + r * stride + (j * Weights::kParts + p) * 4);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[r][v] = Weights::dot(acc[r][v], codes[v], value);
      }
    }
  }
}

#if defined(QIAO_AMX)
template <int R, class Weights> constexpr bool kTiled = Weights::kPlain && R > kFewTiledRows;
using IntUnit = TileShape;
#else
template <int R, class Weights> constexpr bool kTiled = false;
struct IntUnit {
  explicit IntUnit(int) {}
};
#endif

#if defined(QIAO_MATRIX_BYTES)
// The same for an even number of rows, by products of two rows with two columns, eight bytes deep.
template <int R, int Q, class Weights>
inline __attribute__((always_inline)) void add_pairs(const Weights& w, long block, int from, const uint8_t* x, long stride,
                                                     typename Weights::Total (&acc)[R][kVecs]) {
  Square sums[R / 2][kVecs][2];
#pragma GCC unroll 8
  for (int p = 0; p < R / 2; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[p][v][0] = sums[p][v][1] = no_square();
#pragma GCC unroll 4
  for (int j = 0; j < Q; j += 2) {
    B rows[R / 2];
#pragma GCC unroll 8
    for (int p = 0; p < R / 2; ++p) rows[p] = two_rows(x + 2 * p * stride + 4 * j, x + (2 * p + 1) * stride + 4 * j);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const B first = w.quad(block, from + j, v, 0), second = w.quad(block, from + j + 1, v, 0);
      const B low = zip_low(first, second), high = zip_high(first, second);
#pragma GCC unroll 8
      for (int p = 0; p < R / 2; ++p) {
        sums[p][v][0] = add_square(sums[p][v][0], rows[p], low);
        sums[p][v][1] = add_square(sums[p][v][1], rows[p], high);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < R / 2; ++p)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[2 * p][v] = {add(lanes(acc[2 * p][v]), first_row(sums[p][v][0], sums[p][v][1])).v};
      acc[2 * p + 1][v] = {add(lanes(acc[2 * p + 1][v]), second_row(sums[p][v][0], sums[p][v][1])).v};
    }
}
#endif

// acc[r][v] = the sum over `steps` times Q quads of R rows' codes at x, from quad `from` of a block on. `sums` as in start_s8.
template <int R, int Q, class Weights>
inline __attribute__((always_inline)) void dot_quads(const Weights& w, long block, int from, int steps, const uint8_t* x, long stride,
                                                     const int32_t* sums, typename Weights::Total (&acc)[R][kVecs]) {
  if constexpr (kTiled<R, Weights>) {
#if defined(QIAO_AMX)
    (void)sums;
    return tiled_sums<R, Q>(w.base + (block * 8 + from) * 4 * kStrip, x, stride, steps, acc);
#endif
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Weights::start(sums[r]);
  for (int i = 0; i < steps; ++i, x += Q * 4 * Weights::kParts) {
    if (R == 1 && from == 0) w.ahead(block + i * Q / 8);
#if defined(QIAO_MATRIX_BYTES)
    if constexpr (R % 2 == 0) {
      add_pairs<R, Q>(w, block + i * Q / 8, from, x, stride, acc);
      continue;
    }
#endif
    add_dots<R, Q>(w, block + i * Q / 8, from, x, stride, acc);
  }
}

// total += sums * (scale * step), less the zero point: as an integer, or as shift * (step * sum of the activations' codes).
template <Shift Kind, int R, class Total>
inline __attribute__((always_inline)) void add_scaled(const Total (&acc)[R][kVecs], const float* steps, const float* less,
                                                      const int32_t* whole, const F* scale, const F* shift, F (&total)[R][kVecs]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F size = set(steps[r]);
    [[maybe_unused]] F back;
    [[maybe_unused]] I off;
    if constexpr (Kind == Shift::kFloat) back = set(less[r]);
    if constexpr (Kind == Shift::kWhole) off = iset(whole[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      I sum = lanes(acc[r][v]);
      if constexpr (Kind == Shift::kWhole) sum = add(sum, off);
      total[r][v] = fma(to_float(sum), mul(scale[v], size), total[r][v]);
      if constexpr (Kind == Shift::kFloat) total[r][v] = fma(shift[v], back, total[r][v]);
    }
  }
}

// R rows by blocks [first, last) of 32 inputs of a strip, Q quads of inputs to a step.
template <int R, int Q, class Weights, class Scales>
inline void add_blocks(const Weights& w, Scales scales, const RoundedRows& q, int row, int first, int last, F (&total)[R][kVecs]) {
  constexpr int kSteps = 8 / Q, kBytes = 4 * Weights::kParts;
  const uint8_t* x = q.codes + row * q.stride + long(first) * 8 * kBytes;
  const Shift kind = scales.kind();
  long at = long(first) * kSteps * q.rows + row;
  for (long block = 0; block < last - first; ++block, x += 8 * kBytes) {
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step, at += q.rows) {
      typename Weights::Total acc[R][kVecs];
      dot_quads<R, Q>(w, block, step * Q, 1, x + step * Q * kBytes, q.stride, q.sums + at, acc);
      F scale[kVecs], shift[kVecs];
      scales.next(scale, shift);
      const float *steps = q.steps + at, *less = q.less + at;
      const int32_t* whole = q.sums + at;
      if (kind == Shift::kWhole) add_scaled<Shift::kWhole>(acc, steps, less, whole, scale, shift, total);
      else if (kind == Shift::kFloat) add_scaled<Shift::kFloat>(acc, steps, less, whole, scale, shift, total);
      else add_scaled<Shift::kNone>(acc, steps, less, whole, scale, shift, total);
    }
  }
}

// Calls function(rows in the tile, first row) for as even tiles as can be.
template <class Function>
inline void over_row_tiles(int rows, Function function) {
  const int tiles = (rows + kIntRows - 1) / kIntRows;
  for (int i = 0, r = 0; i < tiles; ++i) {
    const int n = (rows - r + tiles - i - 1) / (tiles - i);
    with_constant<kIntRows>(n, [&](auto count) { function(count, r); });
    r += n;
  }
}

template <class Weights>
inline Weights strip_of(const MatmulArgs& a, int strip) {
  const long bytes = (a.kind == kInt4 ? kBlockBytes : 32L * kStrip) * ((a.in + kBlock - 1) / kBlock);
  return Weights{static_cast<const uint8_t*>(a.weight) + strip * bytes};
}

// Few rows: straight from the packed weight, one strip after the other.
template <int Q, class Weights>
inline void rounded_strip(const MatmulArgs& a, const RoundedRows& q, int first, int row, int rows, int strip) {
  const int blocks = (a.in + kBlock - 1) / kBlock;
  over_row_tiles(rows, [&](auto count, int r) {
    constexpr int R = decltype(count)::value;
    F total[R][kVecs];
    for (auto& t : total) for (auto& lane : t) lane = zero();
    add_blocks<R, Q>(strip_of<Weights>(a, strip), ScaleRows(a, strip), q, row + r, 0, blocks, total);
    for (int i = 0; i < R; ++i) finish(a, first + row + r + i, strip, total[i]);
  });
}

// Codes of blocks [from, to) of a strip as bytes, and their scales in float.
inline void unpack(const PackedInt4& w, ScaleRows& scales, int from, int to, int steps, uint8_t* codes, float* wide) {
  for (int b = from; b < to; ++b) {
    for (int j = 0; j < 8; ++j)
      for (int v = 0; v < kVecs; ++v, codes += 4 * W) store_plain(codes, w.quad(b, j, v, 0));
    for (int s = 0; s < steps; ++s, wide += 2 * kStrip) {
      F scale[kVecs], shift[kVecs];
      scales.next(scale, shift);
      for (int v = 0; v < kVecs; ++v) store(wide + v * W, scale[v]), store(wide + kStrip + v * W, shift[v]);
    }
  }
}

// Many rows by one strip of int4: a stretch of blocks is unpacked once for all of them.
template <int Q>
inline void many_rounded(const MatmulArgs& a, const RoundedRows& q, int first, int row, int rows, int strip) {
  const int blocks = (a.in + kBlock - 1) / kBlock;
  uint8_t* codes = scratch_of<uint8_t>(kPanel, long(kUnpacked) * 32 * kStrip + kUnpacked * 4L * kStrip * sizeof(float));
  float* wide = reinterpret_cast<float*>(codes + long(kUnpacked) * 32 * kStrip);
  float* totals = scratch_of<float>(kTotals, long(rows) * kStrip);
  ScaleRows scales(a, strip);
  for (int from = 0; from < blocks; from += kUnpacked) {
    const int to = smaller(blocks, from + kUnpacked);
    unpack(strip_of<PackedInt4>(a, strip), scales, from, to, 8 / Q, codes, wide);
    over_row_tiles(rows, [&](auto count, int r) {
      constexpr int R = decltype(count)::value;
      F total[R][kVecs];
      float* kept = totals + long(r) * kStrip;
      for (int i = 0; i < R; ++i)
        for (int v = 0; v < kVecs; ++v) total[i][v] = from ? load(kept + i * kStrip + v * W) : zero();
      add_blocks<R, Q>(WideInt4{{codes}}, WideScales{wide, scales.kind()}, q, row + r, from, to, total);
      for (int i = 0; i < R; ++i) {
        if (to == blocks) finish(a, first + row + r + i, strip, total[i]);
        else for (int v = 0; v < kVecs; ++v) store(kept + i * kStrip + v * W, total[i][v]);
      }
    });
  }
}

// int8 with one step a row and one scale a column: the whole product is one exact integer.
inline void whole_rows(const MatmulArgs& a, const RoundedRows& q, int first, int row, int rows, int strip) {
  const int blocks = (a.in + kBlock - 1) / kBlock;
  const PackedInt8 w = strip_of<PackedInt8>(a, strip);
  over_row_tiles(rows, [&](auto count, int r) {
    constexpr int R = decltype(count)::value;
    I acc[R][kVecs];
    dot_quads<R, 8>(w, 0, 0, blocks, q.codes + (row + r) * q.stride, q.stride, q.sums + row + r, acc);
    F scale[kVecs], shift[kVecs];
    ScaleRows(a, strip).next(scale, shift);
    for (int i = 0; i < R; ++i) {
      F total[kVecs];
      for (int v = 0; v < kVecs; ++v) total[v] = mul(to_float(acc[i][v]), mul(scale[v], set(q.steps[row + r + i])));
      finish(a, first + row + r + i, strip, total);
    }
  });
}

inline void rounded_task(const MatmulArgs& a, const RoundedRows& q, int first, int row, int rows, int strip) {
  const bool many = rows > kFewTiles * kIntRows;
  if (a.block < 0) whole_rows(a, q, first, row, rows, strip);
  else if (a.kind == kInt8 && a.block == 16) rounded_strip<4, PackedInt8>(a, q, first, row, rows, strip);
  else if (a.kind == kInt8) rounded_strip<8, PackedInt8>(a, q, first, row, rows, strip);
  else if (a.block == 16) many ? many_rounded<4>(a, q, first, row, rows, strip) : rounded_strip<4, PackedInt4>(a, q, first, row, rows, strip);
  else many ? many_rounded<8>(a, q, first, row, rows, strip) : rounded_strip<8, PackedInt4>(a, q, first, row, rows, strip);
}

inline void rounded_matmul(const MatmulArgs& a) {
  const int strips = (a.out + kStrip - 1) / kStrip;
  for (int first = 0; first < a.rows; first += kPanelRows) {
    const int rows = smaller(kPanelRows, a.rows - first);
    const RoundedRows q = round_rows(a, first, rows);
    const int fit = int(kCodesInCache / q.stride) / kIntRows * kIntRows;
    const int block = smaller(rows, larger(4 * kIntRows, fit)), blocks = (rows + block - 1) / block;
    auto task = [&](int i) {
      [[maybe_unused]] const IntUnit unit(a.block == 16 ? 4 : 8);
      const int row = i / strips * block;
      rounded_task(a, q, first, row, smaller(block, rows - row), i % strips);
    };
    if (blocks == 1) in_runs(strips, task);
    else parallel(strips * blocks, task);
  }
}

// The panel of each strip of a scaled weight.
template <template <class> class Panel, class S>
inline auto scaled_panels(const MatmulArgs& a, long strip_bytes) {
  const int groups = (a.in + a.group - 1) / a.group;
  return [&a, strip_bytes, groups](int strip) {
    const long at = long(strip) * groups * kStrip;
    const S* zeros = a.zero ? static_cast<const S*>(a.zero) + at : nullptr;
    return Panel<S>{static_cast<const uint8_t*>(a.weight) + strip * strip_bytes,
                    {static_cast<const S*>(a.scale) + at, zeros, a.all_zeros, a.group}};
  };
}

inline void matmul(const MatmulArgs& a) {
  const bool half = a.scale_type == kFloat16;
  const long blocks = (a.in + kBlock - 1) / kBlock;
  if (a.kind == kDense) {
    dense_matmul(a);
  } else if (a.block) {
    rounded_matmul(a);
  } else if (a.kind == kInt8) {
    if (half) float_matmul(a, scaled_panels<Int8Panel, f16>(a, blocks * 32 * kStrip));
    else float_matmul(a, scaled_panels<Int8Panel, float>(a, blocks * 32 * kStrip));
  } else {
    if (half) float_matmul(a, scaled_panels<Int4Panel, f16>(a, blocks * kBlockBytes));
    else float_matmul(a, scaled_panels<Int4Panel, float>(a, blocks * kBlockBytes));
  }
}

}  // namespace QIAO_VARIANT
}  // namespace qiao
