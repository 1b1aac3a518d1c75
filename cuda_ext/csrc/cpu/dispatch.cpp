// Picks the best instruction set that this machine has, when the library is loaded.
#include <cstring>

#if defined(RAYLM_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "raylm/cpu/kernels.h"

namespace raylm {

CpuKernels generic();
#if defined(RAYLM_X86)
CpuKernels avx2();
CpuKernels avx512();
CpuKernels avx512vnni();
#endif
#if defined(RAYLM_AMX)
CpuKernels amx();
#endif

namespace {

#if defined(RAYLM_AMX)
// Whether the chip has tiles of bytes and the system lets this process use them, which it must be asked for.
bool may_use_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The table called `isa`, or the best one for null. False where this machine cannot run it.
bool choose(const char* isa, CpuKernels& table) {
  const auto wanted = [isa](const char* name) { return isa == nullptr || std::strcmp(isa, name) == 0; };
#if defined(RAYLM_X86)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
#if defined(RAYLM_AMX)
  if (has_vnni && wanted("amx") && may_use_amx()) return table = amx(), true;
#endif
  if (has_vnni && wanted("avx512vnni")) return table = avx512vnni(), true;
  if (has_avx512 && wanted("avx512")) return table = avx512(), true;
  if (has_avx2 && wanted("avx2")) return table = avx2(), true;
#endif
  if (wanted("generic")) return table = generic(), true;
  return false;
}

CpuKernels& chosen() {
  static CpuKernels table = [] {
    CpuKernels best;
    choose(nullptr, best);
    return best;
  }();
  return table;
}

}  // namespace

const CpuKernels& cpu_kernels() { return chosen(); }

}  // namespace raylm

// The instruction set in use: "amx", "avx512vnni", "avx512", "avx2" or "generic".
extern "C" __attribute__((visibility("default"))) const char* raylm_cpu_isa() { return raylm::chosen().isa; }

// Runs another one from now on, for tests and comparisons; not while an operator runs. False, and no change, where this
// machine or this build does not have it.
extern "C" __attribute__((visibility("default"))) bool raylm_use_cpu_isa(const char* isa) {
  return raylm::choose(isa, raylm::chosen());
}
