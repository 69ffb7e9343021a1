// Which instruction sets this processor and its operating system can run, and which is preferred.
#include "variants.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qiao {

// QIAO_HAS_name is 1 where the compiler could build that variant: see CMakeLists.txt.
#define QIAO_ADD(name, condition, score, needs) out.push_back({#name, kernels_##name, (condition) ? score : 0, needs})

#if defined(__x86_64__)
namespace {

bool avx_vnni() {  // leaf 7, subleaf 1, bit 4 of EAX; older compilers' __builtin_cpu_supports does not know it
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

}  // namespace
#endif

std::vector<Variant> variants() {
  std::vector<Variant> out = {{"scalar", kernels_scalar, 1, "nothing"}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  [[maybe_unused]] bool vnni256 = avx2 && avx_vnni();
  [[maybe_unused]] bool vnni512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                  __builtin_cpu_supports("avx512vnni");
#if defined(QIAO_EMULATED)
  vnni256 = vnni512 = avx2;
#endif
  QIAO_ADD(avx2, avx2, 10, "AVX2, FMA, F16C");
#if QIAO_HAS_avx2_vnni
  QIAO_ADD(avx2_vnni, vnni256, 15, "AVX2, FMA, F16C, AVX-VNNI");
#endif
#if QIAO_HAS_avx512
  QIAO_ADD(avx512, vnni512, 20, "AVX-512 F, BW, DQ, VL, VNNI");
#endif
#elif defined(__aarch64__)
  [[maybe_unused]] const unsigned long features = getauxval(AT_HWCAP);
  QIAO_ADD(neon, true, 10, "NEON");
#if QIAO_HAS_neon_dotprod
  QIAO_ADD(neon_dotprod, features >> 20 & 1, 20, "NEON, DOTPROD");  // HWCAP_ASIMDDP
#endif
#endif
  return out;
}

}  // namespace qiao
