// What Python calls through ctypes: plain C functions, and the choice of the instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "elements.h"
#include "experts.h"
#include "kernels.h"
#include "pool.h"
#include "program.h"
#include "sample.h"
#include "variants.h"

#define QIAO_EXPORT extern "C" __attribute__((visibility("default")))

namespace qiao {
namespace {

const Kernels* best() {
  auto all = variants();
  return std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.score < b.score; })->table();
}

const Kernels* chosen = best();

enum Status : int { kDone = 0, kNoMemory = 1, kOutside = 2, kNotRecordable = 3 };

// Runs function and turns an exception into a number, for nothing may be thrown into Python.
template <class Function>
int guarded(Function&& function) {
  try {
    function();
    return kDone;
  } catch (const std::out_of_range&) {
    return kOutside;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// For what changes more than its results and so makes no sense in a program.
template <class Function>
int unrecorded(Function&& function) {
  return recording() ? kNotRecordable : guarded(function);
}

// For kernels: also adds the call to the program that this thread records. `function` captures by value, [=] and never
// [&], since it is called again when the caller's variables are gone; what a pointer argument points to is copied first.
template <class Function>
int recorded(const char* name, Function function) {
  return guarded([&] {
    function();
    if (Program* program = recording()) program->append(name, function);
  });
}

}  // namespace
}  // namespace qiao

using namespace qiao;

// "name score needs" a line.
QIAO_EXPORT const char* qiao_cpu_variants() {
  thread_local std::string text;
  text.clear();
  for (auto& v : variants()) text += std::string(v.name) + " " + std::to_string(v.score) + " " + v.needs + "\n";
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
QIAO_EXPORT int qiao_cpu_finest() { return chosen->finest; }
QIAO_EXPORT int qiao_cpu_threads() { return threads(); }
QIAO_EXPORT int qiao_cpu_set_threads(int count, const int* cpus, int num_cpus) {
  return unrecorded([&] { set_threads(count, cpus, num_cpus); });
}

QIAO_EXPORT int qiao_cpu_pack_dense(const void* from, void* to, int rows, int columns, int type) {
  return unrecorded([&] { chosen->pack_dense(from, to, rows, columns, type); });
}
QIAO_EXPORT int qiao_cpu_pack_int8(const int8_t* from, void* to, int rows, int columns) {
  return unrecorded([&] { chosen->pack_int8(from, to, rows, columns); });
}
QIAO_EXPORT int qiao_cpu_pack_int4(const uint8_t* from, void* to, int rows, int columns) {
  return unrecorded([&] { chosen->pack_int4(from, to, rows, columns); });
}

QIAO_EXPORT int qiao_cpu_matmul(const PackedWeight* weight, void* x, long x_stride, int type, int rows, void* bias,
                                int bias_type, void* y) {
  MatmulArgs a{};
  static_cast<PackedWeight&>(a) = *weight;
  a.x = {x, x_stride, type};
  a.y = {y, weight->out, type};
  a.rows = rows;
  a.bias = {bias, 0, bias_type};
  return recorded("matmul", [=, run = chosen->matmul] { run(a); });
}

QIAO_EXPORT int qiao_cpu_attention(const Heads* query, void* out, const Cache* cache, int heads, int seqs,
                                   const int32_t* query_start, const int32_t* lens, const int32_t* tables,
                                   long table_width, float scale, float soft_cap, int window) {
  const Heads result = {out, long(heads) * cache->size, cache->size, query->type};
  const AttentionArgs a = {*query, result, *cache, heads, seqs, query_start, lens, tables, table_width, scale, soft_cap, window};
  return recorded("attention", [=, run = chosen->attention] { run(a); });
}

QIAO_EXPORT int qiao_cpu_rotary(const RotaryArgs* args) {
  return recorded(args->value.data ? "rope_write_kv" : "rotary", [a = *args, run = chosen->rotary] { run(a); });
}
QIAO_EXPORT int qiao_cpu_write(const Heads* key, const Heads* value, const Cache* cache, const int64_t* slots, int tokens) {
  return recorded("write_kv", [=, k = *key, v = *value, c = *cache, run = chosen->write] { run(k, v, c, slots, tokens); });
}
QIAO_EXPORT int qiao_cpu_copy_blocks(const Cache* cache, const int64_t* from, const int64_t* to, int count,
                                     long key_bytes, long value_bytes) {
  return recorded("copy_blocks", [=, c = *cache, run = chosen->copy_blocks] { run(c, from, to, count, key_bytes, value_bytes); });
}

QIAO_EXPORT int qiao_cpu_norm(void* x, long x_stride, void* residual, long residual_stride, int type, void* weight,
                              int weight_type, void* out, int rows, int size, float eps) {
  const Rows in = {x, x_stride, type}, sum = {residual, residual_stride, type}, gain = {weight, 0, weight_type}, to = {out, size, type};
  return recorded(residual ? "add_rms_norm" : "rms_norm", [=, run = chosen->norm] { run(in, sum, gain, to, rows, size, eps); });
}
QIAO_EXPORT int qiao_cpu_gated(void* x, long x_stride, int type, void* out, int rows, int size, int gelu) {
  const Rows in = {x, x_stride, type}, to = {out, size, type};
  return recorded(gelu ? "gelu_mul" : "silu_mul", [=, run = chosen->gated] { run(in, to, rows, size, gelu); });
}

QIAO_EXPORT int qiao_cpu_gather_rows(const void* table, long table_rows, long table_stride, long row_bytes,
                                     const int64_t* ids, void* out, int rows) {
  return recorded("gather_rows", [=, run = chosen->gather_rows] {
    if (run(table, table_rows, table_stride, row_bytes, ids, out, rows)) throw std::out_of_range("row");
  });
}
QIAO_EXPORT int qiao_cpu_convert(void* x, long x_stride, int x_type, void* out, long out_stride, int out_type, int rows,
                                 int size) {
  const Rows in = {x, x_stride, x_type}, to = {out, out_stride, out_type};
  return recorded("convert", [=, run = chosen->convert] { run(in, to, rows, size); });
}
QIAO_EXPORT int qiao_cpu_scale(void* x, long x_stride, int x_type, float factor, void* out, long out_stride, int out_type,
                               int rows, int size) {
  const Rows in = {x, x_stride, x_type}, to = {out, out_stride, out_type};
  return recorded("scale", [=, run = chosen->scale] { run(in, factor, to, rows, size); });
}
QIAO_EXPORT int qiao_cpu_add(void* x, long x_stride, int x_type, void* y, long y_stride, int y_type, void* out,
                             long out_stride, int out_type, int rows, int size) {
  const Rows a = {x, x_stride, x_type}, b = {y, y_stride, y_type}, to = {out, out_stride, out_type};
  return recorded("add", [=, run = chosen->add] { run(a, b, to, rows, size); });
}
QIAO_EXPORT int qiao_cpu_soft_cap(void* x, long x_stride, int x_type, float cap, void* out, long out_stride, int out_type,
                                  int rows, int size) {
  const Rows in = {x, x_stride, x_type}, to = {out, out_stride, out_type};
  return recorded("soft_cap", [=, run = chosen->soft_cap] { run(in, cap, to, rows, size); });
}

QIAO_EXPORT int qiao_cpu_argmax(const float* logits, long stride, int64_t* out, int rows, int vocab) {
  return recorded("argmax", [=, run = chosen->argmax] { run(logits, stride, out, rows, vocab); });
}
QIAO_EXPORT int qiao_cpu_sample(const float* logits, long stride, const float* temperature, const int32_t* top_k,
                                const float* top_p, const float* min_p, const float* uniform, int64_t* out, int rows,
                                int vocab) {
  return recorded("sample", [=, kernels = chosen] {
    auto task = [=](int r) {
      out[r] = sample_row(*kernels, logits + r * stride, vocab, {temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]});
    };
    parallel(rows, task);
  });
}

// `experts` must outlive the program.
QIAO_EXPORT int qiao_cpu_expert_matmul(const PackedWeight* experts, int count, void* x, long x_stride, int type, int rows,
                                       const int64_t* ids, void* y) {
  const Rows in = {x, x_stride, type}, to = {y, experts[0].out, type};
  return recorded("expert_matmul", [=, kernels = chosen] { expert_matmul(*kernels, experts, count, in, to, rows, ids); });
}
QIAO_EXPORT int qiao_cpu_route_experts(void* logits, long stride, int type, int rows, int experts, int top_k, int normalise,
                                       void* weights, int64_t* ids) {
  const Rows in = {logits, stride, type}, to = {weights, top_k, type};
  return recorded("route_experts", [=, kernels = chosen] { route_experts(*kernels, in, rows, experts, top_k, normalise, to, ids); });
}
QIAO_EXPORT int qiao_cpu_combine_experts(void* x, int type, void* weights, int weights_type, void* out, int tokens, int chosen_count,
                                         int size) {
  const Rows in = {x, size, type}, share = {weights, chosen_count, weights_type}, to = {out, size, type};
  return recorded("combine_experts", [=, kernels = chosen] { combine_experts(*kernels, in, share, to, tokens, chosen_count, size); });
}

QIAO_EXPORT int qiao_cpu_copy(const Copy* args) {
  return recorded("copy", [a = *args] { copy(a); });
}
QIAO_EXPORT int qiao_cpu_zero(void* to, long bytes) {
  return recorded("zero", [=] { memset(to, 0, bytes); });
}
QIAO_EXPORT int qiao_cpu_gather_columns(const char* x, long x_stride, int x_columns, const int64_t* ids, int columns, char* out,
                                        int rows, int bytes) {
  return recorded("gather_columns", [=] { gather_columns(x, x_stride, x_columns, ids, columns, out, rows, bytes); });
}
QIAO_EXPORT int qiao_cpu_widen_bytes(const void* x, int is_signed, float* out, long n) {
  return recorded("widen_bytes", [=] { widen_bytes(x, is_signed, out, n); });
}
QIAO_EXPORT int qiao_cpu_combine(const Combine* args) {
  return recorded("combine", [a = *args] { combine(a); });
}

// Calls of this thread are run and added to a new program until `record_end`. Null where this thread records already.
QIAO_EXPORT Program* qiao_cpu_record_begin() {
  if (recording()) return nullptr;
  auto* program = new (std::nothrow) Program;
  record_into(program);
  return program;
}
QIAO_EXPORT void qiao_cpu_record_end() { record_into(nullptr); }
// On an error `step` is the number of the call that failed.
QIAO_EXPORT int qiao_cpu_replay(const Program* program, int* step) {
  return guarded([&] { program->replay(*step); });
}
// Replays and adds to seconds[i] what call i took.
QIAO_EXPORT int qiao_cpu_profile(const Program* program, int* step, double* seconds) {
  return guarded([&] { program->profile(*step, seconds); });
}
QIAO_EXPORT int qiao_cpu_program_size(const Program* program) { return program->size(); }
QIAO_EXPORT long qiao_cpu_program_bytes(const Program* program) { return long(program->bytes()); }
QIAO_EXPORT const char* qiao_cpu_program_step(const Program* program, int step) { return program->name(step); }
QIAO_EXPORT void qiao_cpu_program_free(Program* program) { delete program; }

// Work of known size for benchmarks: 0 reads `amount` bytes of memory, 1 does 12 * lanes * `amount` multiply-adds a thread.
QIAO_EXPORT int qiao_cpu_work(int kind, const void* memory, long amount) {
  return unrecorded([&] { kind == 0 ? chosen->read_all(memory, amount) : chosen->multiply_add_all(amount); });
}
