// An instruction set that is another one and brings products of its own: its linear layers of int8 or bfloat16 activations.
// All else is the other's, and so is the layout of packed weights. Compiled once for each, see CMakeLists.txt.
#include "matmul_int8.h"
#include "names.h"

namespace qiao {

const Kernels* QIAO_JOIN(kernels_, QIAO_BASE)();

namespace QIAO_VARIANT {

inline void matmul_with_products(const MatmulArgs& a) {
#if defined(QIAO_DOT_BF16) || defined(QIAO_AMX)
  if (a.kind == kDense && a.type == kBFloat16 && a.x.type == kBFloat16) return pair_matmul<bf16>(a);
#endif
#if defined(QIAO_DOT_BYTES) || defined(QIAO_AMX)
  if (a.kind != kDense && a.block) return rounded_matmul(a);
#endif
  QIAO_JOIN(kernels_, QIAO_BASE)()->matmul(a);
}

}  // namespace QIAO_VARIANT

const Kernels* QIAO_JOIN(kernels_, QIAO_VARIANT)() {
  static const Kernels table = [] {
    Kernels kernels = *QIAO_JOIN(kernels_, QIAO_BASE)();
    kernels.name = QIAO_TEXT(QIAO_VARIANT);
    kernels.matmul = QIAO_VARIANT::matmul_with_products;
#if defined(QIAO_DOT_BYTES) || defined(QIAO_AMX)
    kernels.finest = QIAO_VARIANT::kFinest;
#endif
    return kernels;
  }();
  return &table;
}

}  // namespace qiao
