#include "patched_linear.h"

namespace raylm::cuda {

template Tensor patched_product<__nv_bfloat16, Fp8Codes<__nv_bfloat16>>(const PatchedProduct&);
template Tensor patched_product<__nv_bfloat16, Mxfp4Codes<__nv_bfloat16>>(const PatchedProduct&);

}  // namespace raylm::cuda
