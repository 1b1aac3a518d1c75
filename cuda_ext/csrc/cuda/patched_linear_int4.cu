#include "patched_linear.h"

namespace raylm::cuda {

template Tensor patched_product<__nv_bfloat16, Int4Groups<__nv_bfloat16>>(const PatchedProduct&);
template Tensor patched_product<__half, Int4Groups<__half>>(const PatchedProduct&);
template Tensor patched_product<__nv_bfloat16, Int4LongGroups<__nv_bfloat16>>(const PatchedProduct&);
template Tensor patched_product<__half, Int4LongGroups<__half>>(const PatchedProduct&);

}  // namespace raylm::cuda
