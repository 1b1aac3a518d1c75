// What Hopper's copy engine (TMA) has to know of a tensor.
#pragma once

#include <cuda_fp16.h>
#include <cudaTypedefs.h>

#include <cstdint>
#include <type_traits>

namespace raylm::cuda {

// From the driver, which this library is not linked with: it also loads where there is none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
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

// How much the L2 cache brings of what a box lacks. Lines alone are best for what streams by once, of which a second one
// would only come earlier than the memory can give it.
constexpr auto kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B, kPairsOfLines = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

// Sizes and strides in elements, from the innermost dimension (which has the stride 1) on. With 128-byte
// swizzling, boxes are 128 bytes wide; without, they lie in shared memory element after element. False where the copy engine
// cannot address the tensor: strides must be multiples of 16 bytes.
template <typename T, int Rank>
bool make_map(CUtensorMap* map, const T* data, const int64_t (&sizes)[Rank], const int64_t (&strides)[Rank - 1],
              const int64_t (&box)[Rank], CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
              CUtensorMapL2promotion brought = kPairsOfLines) {
  cuuint64_t dims[Rank], bytes[Rank - 1];
  cuuint32_t box_dims[Rank], steps[Rank];
  for (int i = 0; i < Rank; ++i) dims[i] = sizes[i], box_dims[i] = static_cast<cuuint32_t>(box[i]), steps[i] = 1;
  for (int i = 0; i < Rank - 1; ++i) bytes[i] = strides[i] * sizeof(T);
  constexpr auto kType = sizeof(T) == 1             ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                         : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode = tensor_map_encoder();
  return encode && encode(map, kType, Rank, const_cast<T*>(data), dims, bytes, box_dims, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, brought, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) ==
                       CUDA_SUCCESS;
}

}  // namespace raylm::cuda
