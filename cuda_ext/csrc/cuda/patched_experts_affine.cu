#include "patched_experts.h"

namespace raylm::cuda {

template Tensor coded_experts<__nv_bfloat16, Affine4Codes>(const CodedCall&);
template Tensor coded_experts<__nv_bfloat16, Affine8Codes>(const CodedCall&);

}  // namespace raylm::cuda
