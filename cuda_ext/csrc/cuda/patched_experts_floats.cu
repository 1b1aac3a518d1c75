#include "patched_experts.h"

namespace raylm::cuda {

template Tensor coded_experts<__nv_bfloat16, Fp8Codes>(const CodedCall&);
template Tensor coded_experts<__nv_bfloat16, Mxfp4Codes>(const CodedCall&);
template Tensor coded_experts<__nv_bfloat16, Mxfp8Codes>(const CodedCall&);
template Tensor coded_experts<__nv_bfloat16, Nf4Codes>(const CodedCall&);

}  // namespace raylm::cuda
