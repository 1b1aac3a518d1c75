#include "patched_linear.h"

namespace raylm::cuda {

template Tensor patched_product<__nv_bfloat16, Mxfp8Codes<__nv_bfloat16>>(const PatchedProduct&);

}  // namespace raylm::cuda
