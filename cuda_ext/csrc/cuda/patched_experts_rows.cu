#include "patched_experts.h"

namespace raylm::cuda {

template Tensor coded_experts<__nv_bfloat16, Fp8Rows>(const CodedCall&);
template Tensor coded_experts<__nv_bfloat16, Int8Rows>(const CodedCall&);
template Tensor coded_experts<__half, Int8Rows>(const CodedCall&);

}  // namespace raylm::cuda
