// The kernels of few_layers, which are compiled in files of their own: dense models' and mixtures'.
#pragma once

#include "launch.h"
#include "products.h"
#include "raylm/cuda/few_layers.cuh"

namespace raylm::cuda {

// What attention's and the MLP's weights are: numbers, codes of 8 bits with a scale a row, patches. Experts' are patches of
// FP8 where attention's are scaled.
enum class FewForm { kPlain, kScaled, kInt4, kFp8 };

constexpr int kFewStatic = 8 * 1024;  // bytes of shared memory that the kernel has besides
static_assert(sizeof(FewAttentionShared<__half, 128>) + sizeof(FewRouted) <= kFewStatic);

template <typename T>
using FewInt4 = FewPatches<T, Int4Codes<T, 64>, 4>;
template <typename T>
using FewInt4Experts = FewPatches<T, Int4Codes<T, 64>, 2>;
template <typename T>
using FewFp8 = FewPatches<T, Fp8Codes<T>, 2>;

template <typename T>
int shared_besides_rings(const FewLayersArgs<T>& args) {
  return args.x_bytes() + args.norm_bytes() + args.meeting_bytes();
}

// All blocks must live at once, as they wait for each other: a cooperative launch fails where they cannot.
template <typename N, typename E, int D>
void launch_few(const char* op, const FewLayersArgs<typename N::Result>& args, int32_t device, cudaStream_t stream) {
  const int shared = shared_besides_rings(args) + args.stages * kFewWarps * FewReader<N, E, D>::kStage;
  allow_shared<few_layers_kernel<N, E, D>>(op, device, kSharedOfBlock - kFewStatic);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(device_attribute(cudaDevAttrMultiProcessorCount, device));
  config.blockDim = dim3(kFewThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, few_layers_kernel<N, E, D>, args);  // its error is read by check_launch
}

// Of a mixture, whose heads have 128 numbers.
template <typename T>
void launch_mixture(const char* op, FewForm form, const FewLayersArgs<T>& args, int32_t device, cudaStream_t stream);

}  // namespace raylm::cuda
