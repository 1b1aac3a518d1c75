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

// What a miss fetches into the L2 cache: a line of 128 bytes, or that and the line beside it. One line is best where a
// kernel reads all of a large tensor once: pairs of lines cost decode attention 5 % of the bandwidth.
constexpr auto kLines = CU_TENSOR_MAP_L2_PROMOTION_L2_128B, kPairsOfLines = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

// Sizes and strides in elements, from the innermost dimension (which has the stride 1) on. With 128-byte
// swizzling, boxes are 128 bytes wide; without, they lie in shared memory element after element. False where the copy engine
// cannot address the tensor: strides must be multiples of 16 bytes.
template <typename T, int Rank>
bool make_map(CUtensorMap* map, const T* data, const int64_t (&sizes)[Rank], const int64_t (&strides)[Rank - 1],
              const int64_t (&box)[Rank], CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
              CUtensorMapL2promotion fetched = kPairsOfLines) {
  cuuint64_t dims[Rank], bytes[Rank - 1];
  cuuint32_t box_dims[Rank], steps[Rank];
  for (int i = 0; i < Rank; ++i) dims[i] = sizes[i], box_dims[i] = static_cast<cuuint32_t>(box[i]), steps[i] = 1;
  for (int i = 0; i < Rank - 1; ++i) bytes[i] = strides[i] * sizeof(T);
  constexpr auto kType = sizeof(T) == 1             ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                         : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode = tensor_map_encoder();
  return encode && encode(map, kType, Rank, const_cast<T*>(data), dims, bytes, box_dims, steps,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) ==
                       CUDA_SUCCESS;
}

// Of a cache [blocks, block_size, heads, D], given by its strides: boxes hold the D elements of one head in 8 * box_groups
// slots, as [groups of 8 slots][parts of 128 bytes of a head][8 slots]. False also where the heads of a slot don't follow each
// other.
template <typename C, int D>
bool make_heads_map(CUtensorMap* map, const void* cache, int64_t blocks, int64_t block_size, int64_t heads,
                    int64_t block_stride, int64_t slot_stride, int64_t head_stride, int64_t box_groups,
                    CUtensorMapL2promotion fetched = kPairsOfLines) {
  constexpr int64_t kWidth = 128 / sizeof(C), kParts = D / kWidth;
  return (head_stride == D || heads == 1) &&
         make_map<C, 5>(map, static_cast<const C*>(cache), {kWidth, 8, heads * kParts, block_size / 8, blocks},
                        {slot_stride, kWidth, 8 * slot_stride, block_stride}, {kWidth, 8, kParts, box_groups, 1},
                        CU_TENSOR_MAP_SWIZZLE_128B, fetched);
}

}  // namespace raylm::cuda
