#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "pool.h"

namespace qiao {
namespace {

// Memory of this thread that outlives the call, so that a step allocates nothing.
template <class T, int Use>
T* kept(size_t count) {
  thread_local std::vector<T> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

size_t item(int type) { return type == kFloat32 ? 4 : 2; }

char* at(const Rows& rows, long r) { return static_cast<char*>(rows.data) + r * rows.stride * long(item(rows.type)); }

// Rows as float without gaps; themselves where they are.
const float* widened(const Kernels& kernels, const Rows& x, int rows, int size, float* to) {
  if (x.type == kFloat32 && x.stride == size) return static_cast<const float*>(x.data);
  kernels.convert(x, {to, size, kFloat32}, rows, size);
  return to;
}

void route_row(const float* logits, int experts, int top_k, bool normalise, float* share, int* order, float* weights, int64_t* ids) {
  const float most = *std::max_element(logits, logits + experts);
  float sum = 0;
  for (int e = 0; e < experts; ++e) sum += share[e] = std::exp(logits[e] - most);
  std::iota(order, order + experts, 0);
  std::partial_sort(order, order + top_k, order + experts,
                    [=](int a, int b) { return share[a] != share[b] ? share[a] > share[b] : a < b; });
  float chosen = 0;
  for (int i = 0; i < top_k; ++i) chosen += share[order[i]];
  for (int i = 0; i < top_k; ++i) {
    ids[i] = order[i];
    weights[i] = share[order[i]] / (normalise ? chosen : sum);
  }
}

}  // namespace

void route_experts(const Kernels& kernels, const Rows& logits, int rows, int experts, int top_k, bool normalise,
                   const Rows& weights, int64_t* ids) {
  const float* x = widened(kernels, logits, rows, experts, kept<float, 0>(size_t(rows) * experts));
  float *share = kept<float, 1>(experts), *found = kept<float, 2>(size_t(rows) * top_k);
  int* order = kept<int, 3>(experts);
  for (int r = 0; r < rows; ++r)
    route_row(x + long(r) * experts, experts, top_k, normalise, share, order, found + long(r) * top_k, ids + long(r) * top_k);
  kernels.convert({found, top_k, kFloat32}, weights, rows, top_k);
}

void expert_matmul(const Kernels& kernels, const PackedWeight* experts, int count, const Rows& x, const Rows& y, int rows,
                   const int64_t* ids) {
  if (!rows) return;
  int* starts = kept<int, 4>(count + 1);
  std::fill(starts, starts + count + 1, 0);
  for (int r = 0; r < rows; ++r) {
    if (ids[r] < 0 || ids[r] >= count) throw std::out_of_range("expert");
    ++starts[ids[r] + 1];
  }
  std::partial_sum(starts, starts + count + 1, starts);
  int *order = kept<int, 5>(rows), *next = kept<int, 6>(count);
  std::copy(starts, starts + count, next);
  for (int r = 0; r < rows; ++r) order[next[ids[r]]++] = r;
  const long in = experts[0].in, out = experts[0].out, in_bytes = in * item(x.type), out_bytes = out * item(y.type);
  char *inputs = kept<char, 7>(rows * in_bytes), *outputs = kept<char, 8>(rows * out_bytes);
  for (int e = 0; e < count; ++e) {
    const int first = starts[e], n = starts[e + 1] - first;
    if (!n) continue;
    MatmulArgs a{};
    static_cast<PackedWeight&>(a) = experts[e];
    a.rows = n;
    a.x = {at(x, order[first]), x.stride, x.type};
    a.y = {at(y, order[first]), y.stride, y.type};
    if (n > 1) {  // side by side, so that the weight is read once
      for (int i = 0; i < n; ++i) memcpy(inputs + i * in_bytes, at(x, order[first + i]), in_bytes);
      a.x = {inputs, in, x.type};
      a.y = {outputs, out, y.type};
    }
    kernels.matmul(a);
    if (n > 1)
      for (int i = 0; i < n; ++i) memcpy(at(y, order[first + i]), outputs + i * out_bytes, out_bytes);
  }
}

void combine_experts(const Kernels& kernels, const Rows& x, const Rows& weights, const Rows& out, int tokens, int chosen,
                     int size) {
  const float* wide = widened(kernels, x, tokens * chosen, size, kept<float, 9>(size_t(tokens) * chosen * size));
  const float* share = widened(kernels, weights, tokens, chosen, kept<float, 10>(size_t(tokens) * chosen));
  float* sums = kept<float, 11>(size_t(tokens) * size);
  auto task = [=](int t) {
    float* sum = sums + long(t) * size;
    std::fill(sum, sum + size, 0.0f);
    for (int i = 0; i < chosen; ++i) {
      const float weight = share[long(t) * chosen + i], *from = wide + (long(t) * chosen + i) * size;
      for (int k = 0; k < size; ++k) sum[k] += weight * from[k];
    }
  };
  parallel(tokens, task);
  kernels.convert({sums, size, kFloat32}, out, tokens, size);
}

}  // namespace qiao
