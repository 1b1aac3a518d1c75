#include "decode_launch.h"

namespace raylm::cuda {

template bool decode_attention<__half, __half>(const AttentionParams<__half>&, const AttentionCall&);
template bool decode_attention<__nv_bfloat16, __nv_bfloat16>(const AttentionParams<__nv_bfloat16>&, const AttentionCall&);
template bool has_decode_attention<__half, __half>(int64_t, int64_t, int64_t, bool, int);
template bool has_decode_attention<__nv_bfloat16, __nv_bfloat16>(int64_t, int64_t, int64_t, bool, int);

}  // namespace raylm::cuda
