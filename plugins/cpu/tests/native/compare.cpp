// Every variant that this processor can run against the scalar one, and each row alone against the row in a batch, to
// the bit. Needs neither Python nor torch, so it runs under an emulator and under sanitizers.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "../../native/kernels.h"
#include "../../native/pool.h"
#include "../../native/program.h"
#include "../../native/sample.h"
#include "../../native/variants.h"

using namespace qiao;

namespace {

uint64_t state = 1;
float random_float() {  // in [-1, 1)
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return float(int32_t(state >> 32)) / 2147483648.0f;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// n random elements; as bytes, so that one vector serves each type. Half precision bits are made to be ordinary numbers.
std::vector<uint8_t> random_elements(size_t n, int type) {
  std::vector<uint8_t> out(n * (type == kFloat32 ? 4 : 2));
  for (size_t i = 0; i < n; ++i) {
    float x = random_float();
    uint16_t half = type == kBFloat16 ? to_bf16(x) : uint16_t((x < 0 ? 0x8000 : 0) | 0x2c00 | int(std::fabs(x) * 1023) | (i % 3) << 10);
    if (type == kFloat32) memcpy(&out[4 * i], &x, 4);
    else memcpy(&out[2 * i], &half, 2);
  }
  return out;
}

float half_to_float(uint16_t x) {
  float value = std::ldexp(float(x & 1023) + (x >> 10 & 31 ? 1024.0f : 0.0f), std::max(1, x >> 10 & 31) - 25);
  return x & 0x8000 ? -value : value;
}
float element(const std::vector<uint8_t>& data, size_t i, int type) {
  float x;
  uint16_t half;
  if (type == kFloat32) return memcpy(&x, &data[4 * i], 4), x;
  memcpy(&half, &data[2 * i], 2);
  return type == kBFloat16 ? from_bf16(half) : half_to_float(half);
}

int failures = 0, checks = 0;

void check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  if (failures <= 20) printf("FAILED: %s\n", what.c_str());
}

void close(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, int type, const std::string& what) {
  const float tolerance = type == kFloat32 ? 2e-5f : type == kBFloat16 ? 1.6e-2f : 2e-3f;
  const size_t n = a.size() / (type == kFloat32 ? 4 : 2);
  for (size_t i = 0; i < n; ++i) {
    float x = element(a, i, type), y = element(b, i, type);
    if (!(std::fabs(x - y) <= tolerance * (1 + std::fabs(y)))) return check(false, what + " at " + std::to_string(i) + ": " + std::to_string(x) + " is not " + std::to_string(y));
  }
  check(true, what);
}

size_t bytes_of(int type) { return type == kFloat32 ? 4 : type == kSigned8 ? 1 : 2; }

enum ZeroForm { kNoZero, kZero, kScaledZero, kOneZero, kWholeZero };

struct Linear {
  int kind, type, block, group, in, out;
  ZeroForm zero;
};

struct Packed {
  std::vector<uint8_t> weight, scale, zero;
};

Packed pack(const Kernels& k, const Linear& l) {
  const int strips = (l.out + k.strip - 1) / k.strip;
  Packed p;
  if (l.kind == kDense) {
    auto w = random_elements(size_t(l.in) * l.out, l.type);
    p.weight.resize(size_t(strips) * k.strip * (l.in + l.in % 2) * bytes_of(l.type));
    k.pack_dense(w.data(), p.weight.data(), l.out, l.in, l.type);
    return p;
  }
  std::vector<uint8_t> codes(size_t(l.in) * l.out);
  for (auto& c : codes) c = uint8_t(int(random_float() * 128) & (l.kind == kInt4 ? 15 : 255));
  if (l.kind == kInt4) {
    p.weight.resize(size_t(strips) * k.strip * ((l.in + 31) / 32) * 16);
    k.pack_int4(codes.data(), p.weight.data(), l.out, l.in);
  } else {
    p.weight.resize(size_t(strips) * k.strip * ((l.in + 31) / 32) * 32);
    k.pack_int8(reinterpret_cast<int8_t*>(codes.data()), p.weight.data(), l.out, l.in);
  }
  const int groups = (l.in + l.group - 1) / l.group;
  for (auto* part : {&p.scale, &p.zero}) {
    auto values = random_elements(size_t(groups) * l.out, kFloat32);
    part->resize(size_t(strips) * k.strip * groups * 4);
    k.pack_dense(values.data(), part->data(), l.out, groups, kFloat32);
  }
  return p;
}

std::vector<uint8_t> multiply(const Kernels& k, const Linear& l, const Packed& p, std::vector<uint8_t>& x, int x_type, int first, int rows,
                              int y_type, int finest) {
  std::vector<uint8_t> y(size_t(rows) * l.out * bytes_of(y_type));
  MatmulArgs a{};
  a.x = {x.data() + size_t(first) * l.in * bytes_of(x_type), l.in, x_type};
  a.y = {y.data(), l.out, y_type};
  a.rows = rows, a.in = l.in, a.out = l.out, a.kind = l.kind, a.type = l.type;
  a.weight = p.weight.data();
  if (l.kind != kDense) a.scale = p.scale.data();
  if (l.zero == kZero || l.zero == kScaledZero) a.zero = p.zero.data();
  a.group = l.group, a.block = l.block, a.zero_is_scaled = l.zero == kScaledZero;
  if (l.zero == kOneZero) a.all_zeros = 7.5f;
  if (l.zero == kWholeZero) a.all_zeros = 8;
  a.finest = finest;
  k.matmul(a);
  return y;
}

// Integers of quantized rows are equal in all variants, so only the order of float sums differs; sums are large beside
// single entries only where the codes are, hence a bound that goes by the largest.
void near(const std::vector<uint8_t>& got, const std::vector<uint8_t>& want, int type, double bound, const std::string& what) {
  double worst = 0, size = 0;
  for (size_t i = 0; i < got.size() / bytes_of(type); ++i) {
    const double difference = std::fabs(element(got, i, type) - element(want, i, type));
    worst = difference <= worst ? worst : difference;  // NaN stays
    size = std::max<double>(size, std::fabs(element(want, i, type)));
  }
  check(worst <= bound * size, what + ": off by " + std::to_string(worst) + " of " + std::to_string(size));
}

void test_matmul(const Kernels& k, const Kernels& plain) {
  const std::vector<Linear> linears = {
      {kDense, kFloat32, 0, 1, 300, 70, kNoZero}, {kDense, kBFloat16, 0, 1, 300, 70, kNoZero}, {kDense, kFloat16, 0, 1, 37, 33, kNoZero},
      {kDense, kBFloat16, 0, 1, 1101, 40, kNoZero},
      {kInt8, 0, 0, 300, 300, 40, kNoZero},       {kInt8, 0, 0, 25, 300, 40, kZero},           {kInt8, 0, -1, 301, 301, 40, kNoZero},
      {kInt8, 0, 32, 32, 300, 40, kNoZero},       {kInt8, 0, 16, 16, 200, 33, kZero},          {kInt8, 0, 32, 301, 301, 17, kOneZero},
      {kInt4, 0, 0, 20, 300, 40, kZero},          {kInt4, 0, 32, 64, 320, 70, kZero},          {kInt4, 0, 32, 301, 301, 33, kOneZero},
      {kInt4, 0, 16, 16, 1100, 40, kScaledZero},  {kInt4, 0, 32, 32, 1100, 20, kScaledZero},   {kInt4, 0, 32, 128, 200, 9, kNoZero},
      {kInt4, 0, 32, 64, 1100, 33, kWholeZero},   {kInt4, 0, 16, 48, 200, 40, kWholeZero},
  };
  for (const Linear& l : linears)
    for (int x_type : {kFloat32, kBFloat16, kFloat16}) {
      const int rows = 61, finest = l.block < 0 ? 127 : k.finest;
      state = 7;
      Packed mine = pack(k, l);
      state = 7;
      Packed theirs = pack(plain, l);
      auto x = random_elements(size_t(rows) * l.in, x_type);
      std::string name = std::string(k.name) + " matmul kind " + std::to_string(l.kind) + " type " + std::to_string(l.type) + " block " + std::to_string(l.block) + " x " + std::to_string(x_type);
      auto all = multiply(k, l, mine, x, x_type, 0, rows, x_type, finest);
      near(all, multiply(plain, l, theirs, x, x_type, 0, rows, x_type, finest), x_type, x_type == kFloat32 ? 2e-6 : x_type == kBFloat16 ? 8e-3 : 1e-3, name);
      if (x_type == kBFloat16)  // sums before they are rounded
        near(multiply(k, l, mine, x, x_type, 0, rows, kFloat32, finest), multiply(plain, l, theirs, x, x_type, 0, rows, kFloat32, finest), kFloat32, 2e-6, name);
      const size_t row = l.out * bytes_of(x_type);
      for (int threads : {1, 3}) {
        set_threads(threads, nullptr, 0);
        for (int r = 0; r < rows; ++r)
          check(!memcmp(multiply(k, l, mine, x, x_type, r, 1, x_type, finest).data(), all.data() + r * row, row), name + ": row " + std::to_string(r) + " alone");
        for (int count : {2, 3, 5, 7, 12, 20, 60})
          check(!memcmp(multiply(k, l, mine, x, x_type, 1, count, x_type, finest).data(), all.data() + row, count * row), name + ": rows " + std::to_string(count));
      }
    }
}

struct Paged {
  std::vector<uint8_t> key, value;
  std::vector<float> key_scale, value_scale;
  Cache cache;
  std::vector<int32_t> tables;
  long width;
};

Paged paged(int type, int heads, int size, int block, int length) {
  const int wide_block = (block + 15) / 16 * 16, wide_size = (size + 15) / 16 * 16, blocks = (length + block - 1) / block + 1;
  Paged p;
  p.key.assign(size_t(blocks) * heads * size * wide_block * bytes_of(type), 0xff);  // NaN
  p.value.assign(size_t(blocks) * heads * block * wide_size * bytes_of(type), 0xff);
  p.cache = {p.key.data(), p.value.data(), type, heads, size, block, long(heads) * size * wide_block, long(size) * wide_block,
             wide_block, long(heads) * block * wide_size, long(block) * wide_size, wide_size, nullptr, nullptr, 0, 0};
  if (type == kSigned8) {
    for (auto* part : {&p.key_scale, &p.value_scale}) part->assign(size_t(blocks) * heads * block, NAN);
    p.cache.key_scale = p.key_scale.data(), p.cache.value_scale = p.value_scale.data();
    p.cache.scale_block = long(heads) * block, p.cache.scale_head = block;
  }
  p.width = blocks;
  for (int b = 0; b < blocks; ++b) p.tables.push_back(blocks - 1 - b);
  return p;
}

std::vector<uint8_t> attend(const Kernels& k, Paged& p, std::vector<uint8_t>& query, int type, int heads, int first, int count, int window, float cap) {
  const size_t row = size_t(heads) * p.cache.size * bytes_of(type);
  std::vector<uint8_t> out(count * row);
  int32_t starts[] = {0, count}, lens[] = {first + count};
  const long token = long(heads) * p.cache.size;
  k.attention({{query.data() + first * row, token, p.cache.size, type}, {out.data(), token, p.cache.size, type}, p.cache, heads, 1,
               starts, lens, p.tables.data(), p.width, 0.3f, cap, window});
  return out;
}

void test_attention(const Kernels& k, const Kernels& plain) {
  struct Shape { int heads, kv_heads, size, block, window; float cap; };
  for (const Shape& s : {Shape{6, 2, 36, 16, 0, 0}, Shape{3, 3, 64, 5, 0, 2}, Shape{8, 1, 20, 32, 40, 0}})
    for (int kept : {kFloat32, kBFloat16, kFloat16, kSigned8}) {
      const int length = 300, type = kept == kSigned8 ? int(kFloat32) : kept;
      state = 11;
      auto query = random_elements(size_t(length) * s.heads * s.size, type);
      auto key = random_elements(size_t(length) * s.kv_heads * s.size, type), value = random_elements(size_t(length) * s.kv_heads * s.size, type);
      std::vector<uint8_t> results[2];
      std::string name = std::string(k.name) + " attention size " + std::to_string(s.size) + " cache " + std::to_string(kept);
      Paged pages[2] = {paged(kept, s.kv_heads, s.size, s.block, length), paged(kept, s.kv_heads, s.size, s.block, length)};
      const Kernels* tables[2] = {&k, &plain};
      std::vector<int64_t> slots;
      for (int t = 0; t < length; ++t) slots.push_back(int64_t(pages[0].tables[t / s.block]) * s.block + t % s.block);
      for (int i = 0; i < 2; ++i) {
        const long token = long(s.kv_heads) * s.size;
        tables[i]->write({key.data(), token, s.size, type}, {value.data(), token, s.size, type}, pages[i].cache, slots.data(), length);
        results[i] = attend(*tables[i], pages[i], query, type, s.heads, 0, length, s.window, s.cap);
      }
      check(pages[0].key == pages[1].key && pages[0].value == pages[1].value, name + ": stored otherwise");
      close(results[0], results[1], type, name);
      const size_t row = size_t(s.heads) * s.size * bytes_of(type);
      for (int threads : {1, 3}) {
        set_threads(threads, nullptr, 0);
        for (int t : {0, 1, 50, 127, 128, 200, 299})
          check(!memcmp(attend(k, pages[0], query, type, s.heads, t, 1, s.window, s.cap).data(), results[0].data() + t * row, row), name + ": token " + std::to_string(t));
        check(!memcmp(attend(k, pages[0], query, type, s.heads, 100, 77, s.window, s.cap).data(), results[0].data() + 100 * row, 77 * row), name + ": a chunk");
      }
    }
}

void test_light(const Kernels& k, const Kernels& plain) {
  const int rows = 70, size = 333;
  for (int type : {kFloat32, kBFloat16, kFloat16}) {
    std::string name = std::string(k.name) + " type " + std::to_string(type);
    state = 5;
    auto x = random_elements(size_t(rows) * 2 * size, type), gain = random_elements(size, kFloat32), residual = random_elements(size_t(rows) * size, type);
    std::vector<uint8_t> outs[2], residuals[2], gates[2], turned[2];
    const Kernels* tables[2] = {&k, &plain};
    for (int i = 0; i < 2; ++i) {
      outs[i].resize(size_t(rows) * size * bytes_of(type));
      residuals[i] = residual;
      tables[i]->norm({x.data(), 2 * size, type}, {residuals[i].data(), size, type}, {gain.data(), 0, kFloat32}, {outs[i].data(), size, type}, rows, size, 1e-5f);
      gates[i].resize(size_t(rows) * size * bytes_of(type));
      tables[i]->gated({x.data(), 2 * size, type}, {gates[i].data(), size, type}, rows, size, type == kFloat32);
      turned[i] = x;
      auto angles = random_elements(rows * 9, kFloat32);
      RotaryArgs a{};
      a.query = a.key = {turned[i].data(), 2 * size, 37, type};
      a.tokens = rows, a.heads = 8, a.kv_heads = 0, a.size = 37, a.rotated = 18, a.interleaved = type == kBFloat16;
      state = 9;
      a.cos = a.sin = reinterpret_cast<const float*>(angles.data());
      a.cos_stride = a.sin_stride = 9;
      tables[i]->rotary(a);
      state = 5 + 99 * (i + 1);
    }
    close(outs[0], outs[1], type, name + " norm");
    check(residuals[0] == residuals[1], name + " residual");
    close(gates[0], gates[1], type, name + " gate");
  }
}

void test_elements(const Kernels& k, const Kernels& plain) {
  const int rows = 3, size = 333;
  for (int type : {kFloat32, kBFloat16, kFloat16})
    for (int to : {kFloat32, kBFloat16, kFloat16}) {
      state = 13;
      auto x = random_elements(size_t(rows) * size, type), y = random_elements(size_t(rows) * size, type);
      std::vector<uint8_t> outs[2][4];
      const Kernels* tables[2] = {&k, &plain};
      for (int i = 0; i < 2; ++i) {
        for (auto& out : outs[i]) out.resize(size_t(rows) * size * bytes_of(to));
        const Rows from = {x.data(), size, type}, other = {y.data(), size, type};
        auto rows_of = [&](int j) { return Rows{outs[i][j].data(), size, to}; };
        tables[i]->convert(from, rows_of(0), rows, size);
        tables[i]->scale(from, 0.3f, rows_of(1), rows, size);
        tables[i]->add(from, other, rows_of(2), rows, size);
        tables[i]->soft_cap(from, 0.5f, rows_of(3), rows, size);
      }
      const std::string name = std::string(k.name) + " from type " + std::to_string(type) + " to " + std::to_string(to);
      for (int j = 0; j < 3; ++j) check(outs[0][j] == outs[1][j], name + " element kernel " + std::to_string(j));
      close(outs[0][3], outs[1][3], to, name + " soft cap");
    }
  std::vector<uint8_t> table(40 * 50), out(3 * 50, 7);
  for (size_t i = 0; i < table.size(); ++i) table[i] = uint8_t(i / 50);
  const int64_t ids[] = {39, 40, 2};
  check(k.gather_rows(table.data(), 40, 50, 50, ids, out.data(), 3) == 1, std::string(k.name) + " gather tells of a wrong id");
  check(out[0] == 39 && out[50] == 0 && out[99] == 0 && out[149] == 2, std::string(k.name) + " gather");
}

void test_sampling(const Kernels& k) {
  std::vector<float> logits(5000);
  for (auto& x : logits) x = std::round(random_float() * 40) / 4;
  logits[77] = 11, logits[4000] = 11;
  int64_t best;
  k.argmax(logits.data(), 5000, &best, 1, 5000);
  check(best == 77, std::string(k.name) + " argmax takes the lowest id of a tie");
  check(sample_row(k, logits.data(), 5000, {1e-3f, 0, 1, 0, 0.4f}) == 77, "sample, lower half");
  check(sample_row(k, logits.data(), 5000, {1e-3f, 0, 1, 0, 0.6f}) == 4000, "sample, upper half");
}

void test_pool() {
  for (int threads : {1, 2, 5}) {
    set_threads(threads, nullptr, 0);
    for (int round = 0; round < 2000; ++round) {
      const int count = round % 97;
      std::vector<int> seen(count, 0);
      auto task = [&](int i) { ++seen[i]; };
      parallel(count, task);
      for (int i = 0; i < count; ++i) if (seen[i] != 1) return check(false, "a task ran " + std::to_string(seen[i]) + " times");
    }
  }
  check(true, "pool");
}

// Several callers at once, tasks that start tasks, another number of threads meanwhile, and tasks that throw.
void test_callers(const Kernels& k) {
  std::atomic<bool> stop{false};
  std::thread changer([&] {
    for (int i = 0; !stop.load(); ++i) {
      set_threads(1 + i % 4, nullptr, 0);
      std::this_thread::yield();
    }
  });
  std::vector<float> logits(70000, 0.0f);
  logits[65000] = 1;
  auto work = [&] {
    for (int round = 0; round < 300; ++round) {
      std::atomic<int> ran{0};
      auto inner = [&](int) { ran.fetch_add(1); };
      auto outer = [&](int) { parallel(9, inner); };
      parallel(7, outer);
      int64_t best = 0;
      k.argmax(logits.data(), 70000, &best, 1, 70000);
      if (ran.load() != 63 || best != 65000) return false;
    }
    return true;
  };
  bool good[3];
  std::thread first([&] { good[0] = work(); }), second([&] { good[1] = work(); });
  good[2] = work();
  first.join();
  second.join();
  stop.store(true);
  changer.join();
  check(good[0] && good[1] && good[2], "callers at once while the number of threads changes");
  set_threads(3, nullptr, 0);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> ran{0};
    bool thrown = false;
    auto task = [&](int i) {
      ran.fetch_add(1);
      if (i % 5 == 2) throw std::bad_alloc();
    };
    try {
      parallel(16, task);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    check(thrown && ran.load() == 16, "what a task throws reaches the caller after all tasks");
  }
}

// Programs from two threads at once, while a third one calls kernels: each does all its steps in order.
void test_program() {
  constexpr int kTasks = 64, kLinks = 40;
  auto build = [](Program& program, std::vector<int>& data) {
    for (int link = 0; link < kLinks; ++link) {
      int* values = data.data();
      auto step = [values, link] {
        auto task = [=](int i) { values[i] = int(unsigned(values[i]) * 3 + link + i); };
        parallel(kTasks, task);
      };
      program.append("link", step);
    }
  };
  std::vector<int> want(kTasks, 1);
  for (int link = 0; link < kLinks; ++link)
    for (int i = 0; i < kTasks; ++i) want[i] = int(unsigned(want[i]) * 3 + link + i);
  for (int threads : {1, 2, 4}) {
    set_threads(threads, nullptr, 0);
    auto work = [&] {
      Program program;
      std::vector<int> data(kTasks);
      build(program, data);
      for (int round = 0; round < 50; ++round) {
        data.assign(kTasks, 1);
        int step;
        program.replay(step);
        if (data != want) return false;
      }
      return true;
    };
    bool good[3];
    std::thread first([&] { good[0] = work(); }), second([&] { good[1] = work(); });
    good[2] = work();
    first.join();
    second.join();
    check(good[0] && good[1] && good[2], "programs on " + std::to_string(threads) + " threads");
  }
  Program program;
  auto fail = [] { throw std::bad_alloc(); };
  auto fine = [] {};
  program.append("fine", fine);
  program.append("fail", fail);
  for (int round = 0; round < 2; ++round) {
    int step = 0;
    bool thrown = false;
    try {
      program.replay(step);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    check(thrown && step == 1 && std::string(program.name(step)) == "fail", "a step that throws is named");
  }
}

}  // namespace

int main(int count, char** names) {  // the variants to test, without names all; scalar is always the yardstick
  test_pool();
  test_callers(*kernels_scalar());
  test_program();
  for (const Variant& variant : variants()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; ++i) wanted |= !strcmp(names[i], variant.name);
    if (!wanted) continue;
    if (!variant.score) {
      printf("%s: skipped, it needs %s\n", variant.name, variant.needs);
      continue;
    }
    const Kernels& k = *variant.table();
    const int before = checks;
    test_matmul(k, *kernels_scalar());
    test_attention(k, *kernels_scalar());
    test_light(k, *kernels_scalar());
    test_elements(k, *kernels_scalar());
    test_sampling(k);
    printf("%s: %d checks\n", variant.name, checks - before);
  }
  set_threads(1, nullptr, 0);
  printf("%d checks, %d failures\n", checks, failures);
  return failures ? 1 : 0;
}
