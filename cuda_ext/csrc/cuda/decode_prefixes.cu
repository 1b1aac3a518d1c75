// Decode of sequences that share prefixes.
#include "decode_launch.h"

namespace raylm::cuda {

template bool decode_with_prefixes<__half, __half>(const AttentionParams<__half>&, const AttentionCall&);
template bool decode_with_prefixes<__nv_bfloat16, __nv_bfloat16>(const AttentionParams<__nv_bfloat16>&, const AttentionCall&);
template bool decode_with_prefixes<__half, Code>(const AttentionParams<__half>&, const AttentionCall&);
template bool decode_with_prefixes<__nv_bfloat16, Code>(const AttentionParams<__nv_bfloat16>&, const AttentionCall&);

}  // namespace raylm::cuda
