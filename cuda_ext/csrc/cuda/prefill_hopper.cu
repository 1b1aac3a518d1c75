#include <cudaTypedefs.h>

#include <algorithm>
#include <numeric>

#include "prefill_attention.h"
#include "raylm/cuda/prefill_hopper.cuh"

namespace raylm::cuda {
namespace {

#ifdef RAYLM_SM90A
constexpr bool kCompiled = true;
#else
constexpr bool kCompiled = false;  // another architecture was asked for: the kernels are empty
#endif

// From the driver, which this library is not linked with: it also loads where there is none.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found ? function : nullptr);
  }();
  return encoder;
}

// Sizes and strides in elements, from the innermost dimension (which has the stride 1) on. False where the copy engine
// cannot address the tensor: strides must be multiples of 16 bytes.
template <typename T, int Rank>
bool make_map(CUtensorMap* map, const T* data, const int64_t (&sizes)[Rank], const int64_t (&strides)[Rank - 1],
              const int64_t (&box)[Rank]) {
  cuuint64_t dims[Rank], bytes[Rank - 1];
  cuuint32_t box_dims[Rank], steps[Rank];
  for (int i = 0; i < Rank; ++i) dims[i] = sizes[i], box_dims[i] = static_cast<cuuint32_t>(box[i]), steps[i] = 1;
  for (int i = 0; i < Rank - 1; ++i) bytes[i] = strides[i] * sizeof(T);
  constexpr auto kType =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode = tensor_map_encoder();
  return encode && encode(map, kType, Rank, const_cast<T*>(data), dims, bytes, box_dims, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// As HopperParams says. Halves of all heads are one dimension only where heads follow each other without a gap.
template <typename T, int D>
bool make_cache_map(CUtensorMap* map, const T* data, const AttentionParams<T>& a, const PrefillSizes& sizes,
                    int box_slots, int64_t slot_stride, int64_t head_stride, int64_t block_stride) {
  using Shape = HopperShape<D>;
  const int64_t groups = a.block_size / 8, box_groups = box_slots / 8;
  if constexpr (Shape::kWhole) {
    return (head_stride == D || a.num_kv_heads == 1) &&
           make_map<T, 5>(map, data, {64, 8, a.num_kv_heads * Shape::kHalves, groups, sizes.num_blocks},
                          {slot_stride, 64, 8 * slot_stride, block_stride}, {64, 8, Shape::kHalves, box_groups, 1});
  } else {
    return make_map<T, 5>(map, data, {D, 8, a.num_kv_heads, groups, sizes.num_blocks},
                          {slot_stride, head_stride, 8 * slot_stride, block_stride}, {64, 8, 1, box_groups, 1});
  }
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

template <typename T, int D>
bool make_params(HopperParams<T>& params, const AttentionParams<T>& a, const PrefillSizes& sizes) {
  using Shape = HopperShape<D>;
  params.p = prefill_params(a, sizes.num_tokens, sizes.min_query_len);
  const int64_t common = std::gcd<int64_t, int64_t>(a.block_size, Shape::kKeys);
  params.box_slots = static_cast<int>(common & -common);  // a power of two
  return make_map<T, 3>(&params.q, a.q, {D, a.num_heads, sizes.num_tokens}, {a.q_head_stride, a.q_token_stride},
                        {64, 1, Shape::kRows}) &&
         make_cache_map<T, D>(&params.k, a.k_cache, a, sizes, params.box_slots, a.k_slot_stride, a.k_head_stride,
                              a.k_block_stride) &&
         make_cache_map<T, D>(&params.v, a.v_cache, a, sizes, params.box_slots, a.v_slot_stride, a.v_head_stride,
                              a.v_block_stride);
}

template <typename T, int D>
bool launch(const AttentionParams<T>& a, const PrefillSizes& sizes, const Tensor& like, cudaStream_t stream) {
  using Shape = HopperShape<D>;
  HopperParams<T> params;
  if (!make_params<T, D>(params, a, sizes)) return false;
  const Tensor counter = torch::stable::new_empty(like, {1}, ScalarType::Int);
  params.next_tile = data<int>(counter);
  cudaMemsetAsync(params.next_tile, 0, sizeof(int), stream);
  const auto kernel = prefill_hopper_kernel<T, D>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  const int64_t tiles = a.num_heads * most_tiles(sizes.num_tokens, a.num_seqs, sizes.min_query_len, Shape::kRows);
  const int64_t blocks = std::clamp<int64_t>(tiles, 1, device_attribute(cudaDevAttrMultiProcessorCount));
  kernel<<<blocks, Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
  return true;
}

template <typename T>
bool by_head_dim(const AttentionParams<T>& a, const PrefillSizes& sizes, const Tensor& like, cudaStream_t stream) {
  if (a.block_size % 16 != 0 || !(a.scale > 0) || sizes.num_blocks == 0) return false;
  if (!kCompiled || device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return false;
  switch (a.head_dim) {
    case 64: return launch<T, 64>(a, sizes, like, stream);
    case 80: return launch<T, 80>(a, sizes, like, stream);
    case 96: return launch<T, 96>(a, sizes, like, stream);
    case 128: return launch<T, 128>(a, sizes, like, stream);
    case 192: return launch<T, 192>(a, sizes, like, stream);
    case 256: return launch<T, 256>(a, sizes, like, stream);
    default: return false;
  }
}

}  // namespace

bool prefill_attention_hopper(const AttentionParams<__nv_bfloat16>& params, const PrefillSizes& sizes,
                              const Tensor& like, cudaStream_t stream) {
  return by_head_dim(params, sizes, like, stream);
}

bool prefill_attention_hopper(const AttentionParams<__half>& params, const PrefillSizes& sizes, const Tensor& like,
                              cudaStream_t stream) {
  return by_head_dim(params, sizes, like, stream);
}

}  // namespace raylm::cuda
