// The table of CPU kernels for one instruction set. CMake compiles this file once for each, with RAYLM_ISA set to the
// table's name and the compiler's flags set to the instructions it may use.
#include "raylm/cpu/attention.h"
#include "raylm/cpu/block_linear.h"
#include "raylm/cpu/combine.h"
#include "raylm/cpu/gated.h"
#include "raylm/cpu/kernels.h"
#include "raylm/cpu/linear.h"
#include "raylm/cpu/norm.h"
#include "raylm/cpu/rotary.h"
#include "raylm/cpu/store_kv.h"

#define RAYLM_STRING_(x) #x
#define RAYLM_STRING(x) RAYLM_STRING_(x)

// A function that runs kernel<T> for the T that its arguments' dtype names.
#define RAYLM_BY_DTYPE(kernel)                              \
  [](const auto& args, auto... rest) {                              \
    switch (args.dtype) {                                           \
      case DType::kFloat32: return kernel<float>(args, rest...);    \
      case DType::kBFloat16: return kernel<BFloat16>(args, rest...); \
      case DType::kFloat16: return kernel<Float16>(args, rest...);  \
    }                                                               \
  }

namespace raylm {
namespace {

CpuKernels table() {
  return {
      RAYLM_STRING(RAYLM_ISA),      RAYLM_BY_DTYPE(rms_norm),    RAYLM_BY_DTYPE(rotary),    store_kv,
      RAYLM_BY_DTYPE(gated),        RAYLM_BY_DTYPE(linear),      RAYLM_BY_DTYPE(quantise),  RAYLM_BY_DTYPE(block_linear),
      RAYLM_BY_DTYPE(block_gated),  RAYLM_BY_DTYPE(combine),     RAYLM_BY_DTYPE(attention), RAYLM_BY_DTYPE(merge),
  };
}

}  // namespace

// Not a constant of static storage: nothing compiled for this instruction set may run before it is chosen.
CpuKernels RAYLM_ISA() { return table(); }

}  // namespace raylm
