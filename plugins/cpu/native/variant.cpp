// All operators for one instruction set; compiled once for each, see CMakeLists.txt.
#include "attention.h"
#include "light.h"
#include "matmul_int8.h"
#include "names.h"
#include "peak.h"

namespace qiao {

const Kernels* QIAO_JOIN(kernels_, QIAO_VARIANT)() {
  using namespace QIAO_VARIANT;
  static const Kernels table = {
      QIAO_TEXT(QIAO_VARIANT), kStrip, W, QIAO_VARIANT::kFinest, QIAO_VARIANT::pack_dense, QIAO_VARIANT::pack_int8, QIAO_VARIANT::pack_int4,
      QIAO_VARIANT::matmul, QIAO_VARIANT::attention, QIAO_VARIANT::rotary, QIAO_VARIANT::write, QIAO_VARIANT::copy_blocks,
      QIAO_VARIANT::norm, QIAO_VARIANT::gated, QIAO_VARIANT::gather_rows, QIAO_VARIANT::convert, QIAO_VARIANT::scale,
      QIAO_VARIANT::add_rows, QIAO_VARIANT::soft_cap, QIAO_VARIANT::argmax, QIAO_VARIANT::weights_of_logits,
      QIAO_VARIANT::read_all, QIAO_VARIANT::multiply_add_all};
  return &table;
}

}  // namespace qiao
