// Which instruction sets this processor and its operating system can run, and which is preferred.
#include "variants.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qiao {

// QIAO_HAS_name is 1 where the compiler could build that variant: see CMakeLists.txt.
#define QIAO_ADD(name, condition, score, needs) \
  const Kernels* kernels_##name();              \
  out.push_back({#name, kernels_##name, (condition) ? score : 0, needs})

#if defined(__x86_64__)
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  explicit Leaf(int subleaf) { __get_cpuid_count(7, subleaf, &a, &b, &c, &d); }
};

// Newer than what older compilers' __builtin_cpu_supports knows.
bool avx_vnni() { return Leaf(1).a >> 4 & 1; }
bool avx512_bf16() { return Leaf(1).a >> 5 & 1; }

// AMX's tiles are memory that Linux gives to a process that asks for it.
bool amx() {
  const unsigned d = Leaf(0).d;
  if (!(d >> 22 & d >> 24 & d >> 25 & 1)) return false;
  constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

}  // namespace
#endif

std::vector<Variant> variants() {
  std::vector<Variant> out = {{"scalar", kernels_scalar, 1, "nothing"}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  [[maybe_unused]] bool vnni256 = avx2 && avx_vnni();
  [[maybe_unused]] bool vnni512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                                  __builtin_cpu_supports("avx512vnni");
  [[maybe_unused]] bool bf16 = vnni512 && avx512_bf16(), tiles = bf16 && amx();
#if defined(QIAO_EMULATED)
  vnni256 = vnni512 = bf16 = tiles = avx2;
#endif
#if QIAO_HAS_avx2
  QIAO_ADD(avx2, avx2, 10, "AVX2, FMA, F16C");
#endif
#if QIAO_HAS_avx2_vnni
  QIAO_ADD(avx2_vnni, vnni256, 15, "AVX2, FMA, F16C, AVX-VNNI");
#endif
#if QIAO_HAS_avx512
  QIAO_ADD(avx512, vnni512, 20, "AVX-512 F, BW, DQ, VL, VNNI");
#endif
#if QIAO_HAS_avx512_bf16
  // AMD's cores do such a product as quickly as one of floats, and it is worth two; Intel's at half the rate.
  QIAO_ADD(avx512_bf16, bf16, (__builtin_cpu_is("amd") ? 25 : 18), "AVX-512 F, BW, DQ, VL, VNNI, BF16");
#endif
#if QIAO_HAS_amx
  QIAO_ADD(amx, tiles, 30, "AVX-512 F, BW, DQ, VL, VNNI, BF16, AMX TILE, INT8, BF16, and Linux 5.16");
#endif
#elif defined(__aarch64__)
  [[maybe_unused]] const unsigned long features = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
  [[maybe_unused]] const bool dot = features >> 20 & 1;                                   // HWCAP_ASIMDDP
  [[maybe_unused]] const bool matrix = dot && (more >> 13 & 1) && (more >> 14 & 1);      // HWCAP2_I8MM, HWCAP2_BF16
  // HWCAP_SVE, HWCAP2_SVEI8MM, HWCAP2_SVEBF16, and the length of a vector in bytes
  [[maybe_unused]] const bool sve = matrix && (features >> 22 & 1) && (more >> 9 & 1) && (more >> 12 & 1) &&
                                    (prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK) == 32;
#if QIAO_HAS_neon
  QIAO_ADD(neon, true, 10, "NEON");
#endif
#if QIAO_HAS_neon_dotprod
  QIAO_ADD(neon_dotprod, dot, 20, "NEON, DOTPROD");
#endif
#if QIAO_HAS_neon_i8mm
  QIAO_ADD(neon_i8mm, matrix, 30, "NEON, DOTPROD, I8MM, BF16");
#endif
#if QIAO_HAS_sve256
  QIAO_ADD(sve256, sve, 35, "SVE with vectors of 256 bits, I8MM, BF16");  // half as many instructions for the same units
#endif
#endif
  return out;
}

}  // namespace qiao
