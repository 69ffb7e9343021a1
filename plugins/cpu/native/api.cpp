// What Python calls through ctypes: plain C functions, and the choice of the instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "sample.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define QIAO_EXPORT extern "C" __attribute__((visibility("default")))

namespace qiao {
namespace {

struct Variant {
  const char* name;
  const Kernels* (*table)();
  int score;  // a higher one is preferred; 0: this processor cannot run it
};

std::vector<Variant> variants() {
  std::vector<Variant> out = {{"scalar", kernels_scalar, 1}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  out.push_back({"avx2", kernels_avx2, avx2 ? 10 : 0});
  out.push_back({"avx512", kernels_avx512, avx512 ? 20 : 0});
#elif defined(__aarch64__)
  out.push_back({"neon", kernels_neon, 10});
  const unsigned long dotprod = 1UL << 20;  // HWCAP_ASIMDDP
  out.push_back({"neon_dotprod", kernels_neon_dotprod, getauxval(AT_HWCAP) & dotprod ? 20 : 0});
#endif
  return out;
}

const Kernels* best() {
  auto all = variants();
  return std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.score < b.score; })->table();
}

const Kernels* chosen = best();

// Runs function and turns an exception into a number, for nothing may be thrown into Python.
template <class Function>
int guarded(Function&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // namespace
}  // namespace qiao

using namespace qiao;

// "name score" a line.
QIAO_EXPORT const char* qiao_cpu_variants() {
  thread_local std::string text;
  text.clear();
  for (auto& v : variants()) text += std::string(v.name) + " " + std::to_string(v.score) + "\n";
  return text.c_str();
}

// 0 when taken, 1 when this build has no such variant, 2 when this processor cannot run it. Weights packed for another
// strip width must not be used afterwards.
QIAO_EXPORT int qiao_cpu_select(const char* name) {
  for (auto& v : variants()) {
    if (strcmp(v.name, name) != 0) continue;
    if (v.score == 0) return 2;
    chosen = v.table();
    return 0;
  }
  return 1;
}

QIAO_EXPORT const char* qiao_cpu_isa() { return chosen->name; }
QIAO_EXPORT int qiao_cpu_strip() { return chosen->strip; }
QIAO_EXPORT int qiao_cpu_lanes() { return chosen->lanes; }
QIAO_EXPORT int qiao_cpu_threads() { return threads(); }
QIAO_EXPORT int qiao_cpu_set_threads(int count, const int* cpus, int num_cpus) {
  return guarded([&] { set_threads(count, cpus, num_cpus); });
}

QIAO_EXPORT int qiao_cpu_pack_dense(const void* from, void* to, int rows, int columns, int bytes) {
  return guarded([&] { chosen->pack_dense(from, to, rows, columns, bytes); });
}
QIAO_EXPORT int qiao_cpu_pack_int8(const int8_t* from, void* to, int32_t* sums, int rows, int columns) {
  return guarded([&] { chosen->pack_int8(from, to, sums, rows, columns); });
}
QIAO_EXPORT int qiao_cpu_pack_int4(const uint8_t* from, void* to, int rows, int columns) {
  return guarded([&] { chosen->pack_int4(from, to, rows, columns); });
}

QIAO_EXPORT int qiao_cpu_matmul(const PackedWeight* weight, void* x, long x_stride, int type, int rows, void* bias,
                                int bias_type, void* y) {
  return guarded([&] {
    MatmulArgs a{};
    static_cast<PackedWeight&>(a) = *weight;
    a.x = {x, x_stride, type};
    a.y = {y, weight->out, type};
    a.rows = rows;
    a.bias = {bias, 0, bias_type};
    chosen->matmul(a);
  });
}

QIAO_EXPORT int qiao_cpu_attention(const Heads* query, void* out, const Cache* cache, int heads, int seqs,
                                   const int32_t* query_start, const int32_t* lens, const int32_t* tables,
                                   long table_width, float scale, float soft_cap, int window) {
  return guarded([&] {
    const Heads result = {out, long(heads) * cache->size, cache->size, query->type};
    chosen->attention({*query, result, *cache, heads, seqs, query_start, lens, tables, table_width, scale, soft_cap, window});
  });
}

QIAO_EXPORT int qiao_cpu_rotary(const RotaryArgs* a) { return guarded([&] { chosen->rotary(*a); }); }
QIAO_EXPORT int qiao_cpu_write(const Heads* key, const Heads* value, const Cache* cache, const int64_t* slots, int tokens) {
  return guarded([&] { chosen->write(*key, *value, *cache, slots, tokens); });
}
QIAO_EXPORT int qiao_cpu_copy_blocks(const Cache* cache, const int64_t* from, const int64_t* to, int count,
                                     long key_bytes, long value_bytes) {
  return guarded([&] { chosen->copy_blocks(*cache, from, to, count, key_bytes, value_bytes); });
}

QIAO_EXPORT int qiao_cpu_norm(void* x, long x_stride, void* residual, long residual_stride, int type, void* weight,
                              int weight_type, void* out, int rows, int size, float eps) {
  return guarded([&] {
    chosen->norm({x, x_stride, type}, {residual, residual_stride, type}, {weight, 0, weight_type}, {out, size, type}, rows, size, eps);
  });
}
QIAO_EXPORT int qiao_cpu_gated(void* x, long x_stride, int type, void* out, int rows, int size, int gelu) {
  return guarded([&] { chosen->gated({x, x_stride, type}, {out, size, type}, rows, size, gelu); });
}

// 2 where an id is outside the table.
QIAO_EXPORT int qiao_cpu_gather_rows(const void* table, long table_rows, long table_stride, long row_bytes,
                                     const int64_t* ids, void* out, int rows) {
  int outside = 0;
  const int status = guarded([&] { outside = chosen->gather_rows(table, table_rows, table_stride, row_bytes, ids, out, rows); });
  return status ? status : outside ? 2 : 0;
}
QIAO_EXPORT int qiao_cpu_convert(void* x, long x_stride, int x_type, void* out, long out_stride, int out_type, int rows,
                                 int size) {
  return guarded([&] { chosen->convert({x, x_stride, x_type}, {out, out_stride, out_type}, rows, size); });
}
QIAO_EXPORT int qiao_cpu_scale(void* x, long x_stride, int x_type, float factor, void* out, long out_stride, int out_type,
                               int rows, int size) {
  return guarded([&] { chosen->scale({x, x_stride, x_type}, factor, {out, out_stride, out_type}, rows, size); });
}
QIAO_EXPORT int qiao_cpu_add(void* x, long x_stride, int x_type, void* y, long y_stride, int y_type, void* out,
                             long out_stride, int out_type, int rows, int size) {
  return guarded([&] {
    chosen->add({x, x_stride, x_type}, {y, y_stride, y_type}, {out, out_stride, out_type}, rows, size);
  });
}
QIAO_EXPORT int qiao_cpu_soft_cap(void* x, long x_stride, int x_type, float cap, void* out, long out_stride, int out_type,
                                  int rows, int size) {
  return guarded([&] { chosen->soft_cap({x, x_stride, x_type}, cap, {out, out_stride, out_type}, rows, size); });
}

QIAO_EXPORT int qiao_cpu_argmax(const float* logits, long stride, int64_t* out, int rows, int vocab) {
  return guarded([&] { chosen->argmax(logits, stride, out, rows, vocab); });
}
QIAO_EXPORT int qiao_cpu_sample(const float* logits, long stride, const float* temperature, const int32_t* top_k,
                                const float* top_p, const float* min_p, const float* uniform, int64_t* out, int rows,
                                int vocab) {
  return guarded([&] {
    auto task = [&](int r) {
      out[r] = sample_row(*chosen, logits + r * stride, vocab, {temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]});
    };
    parallel(rows, task);
  });
}
