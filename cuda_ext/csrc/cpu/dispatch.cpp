// Picks the best instruction set that this machine has, once.
#include "raylm/cpu/kernels.h"

namespace raylm {

CpuKernels generic();
#if defined(RAYLM_X86)
CpuKernels avx2();
CpuKernels avx512();
#endif

static CpuKernels choose() {
#if defined(RAYLM_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return avx512();
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2();
#endif
  return generic();
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels chosen = choose();
  return chosen;
}

}  // namespace raylm
