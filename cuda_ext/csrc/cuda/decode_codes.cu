// Decode over a cache of 8-bit floats.
#include "decode_launch.h"

namespace raylm::cuda {

template bool decode_attention<__half, Code>(const AttentionParams<__half>&, const AttentionCall&);
template bool decode_attention<__nv_bfloat16, Code>(const AttentionParams<__nv_bfloat16>&, const AttentionCall&);
template bool has_decode_attention<__half, Code>(int64_t, int64_t, int64_t, bool, int);
template bool has_decode_attention<__nv_bfloat16, Code>(int64_t, int64_t, int64_t, bool, int);

}  // namespace raylm::cuda
