#include "patched_linear.h"

namespace raylm::cuda {

template Tensor patched_product<__nv_bfloat16, Int8Codes<__nv_bfloat16>>(const PatchedProduct&);
template Tensor patched_product<__half, Int8Codes<__half>>(const PatchedProduct&);

}  // namespace raylm::cuda
