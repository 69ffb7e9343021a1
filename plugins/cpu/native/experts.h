// Mixtures of experts: routing, products with a chosen expert's weight, and the weighted sum. The same for each instruction
// set: the arithmetic that takes time is done by the kernels that are given.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace qiao {

// weights[r][i] and ids[r][i]: the softmax over all `experts` logits of a row, its top_k largest in falling order (ties: lower
// id first), made to sum to 1 where normalise.
void route_experts(const Kernels& kernels, const Rows& logits, int rows, int experts, int top_k, bool normalise,
                   const Rows& weights, int64_t* ids);

// y[r] = x[r] * experts[ids[r]]^T. A row's result is that of the expert's product alone. Throws std::out_of_range for an id
// that is none of `count`.
void expert_matmul(const Kernels& kernels, const PackedWeight* experts, int count, const Rows& x, const Rows& y, int rows,
                   const int64_t* ids);

// out[t] = the sum over i of weights[t][i] * x[t * chosen + i] in float, in order of i; rounded once.
void combine_experts(const Kernels& kernels, const Rows& x, const Rows& weights, const Rows& out, int tokens, int chosen,
                     int size);

}  // namespace qiao
