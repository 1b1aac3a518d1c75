#include "patched_linear.h"

namespace raylm::cuda {

template Tensor patched_product<__nv_bfloat16, Affine4Codes<__nv_bfloat16>>(const PatchedProduct&);
template Tensor patched_product<__nv_bfloat16, Affine8Codes<__nv_bfloat16>>(const PatchedProduct&);

}  // namespace raylm::cuda
