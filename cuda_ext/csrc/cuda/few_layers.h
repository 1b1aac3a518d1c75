// Which kernels there are of few_layers.cuh, what they have in shared memory, and how they are launched.
#pragma once

#include <algorithm>

#include "products.h"
#include "raylm/cuda/few_layers.cuh"

namespace raylm::cuda {

constexpr int kFewStatic = 10 * 1024;  // bytes of shared memory that a kernel has besides
constexpr int kFewLeastStages = 2;     // of a warp's ring: one is used while the other is filled
static_assert(sizeof(FewAttentionShared<__half, 128>) + sizeof(FewRings) + sizeof(FewRouted) <= kFewStatic);

// Calls `use` with what weights hold, as empty objects: attention's, and experts' or NoExperts. `group`: columns of a group
// of integers. Forms of FP8 are there for bfloat16 alone.
template <typename T, typename Use>
void with_weights(FewForm form, int group, bool mixture, const Use& use) {
  if (form == FewForm::kPlain) return mixture ? use(Plain<T>{}, Plain<T>{}) : use(Plain<T>{}, NoExperts{});
  if (form == FewForm::kInt4) {
    if (mixture) return use(Int4<T, 128>{}, Int4<T, 128, 2>{});
    return group == 128 ? use(Int4<T, 128>{}, NoExperts{}) : use(Int4<T, 64>{}, NoExperts{});
  }
  if (form == FewForm::kCodes && !mixture) return use(Scaled<T>{}, NoExperts{});
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (form == FewForm::kCodes) return use(Scaled<T>{}, Fp8<T>{});
    mixture ? use(Fp8<T>{}, Fp8<T>{}) : use(Fp8<T>{}, NoExperts{});
  }
}

// Shares out shared memory: as many stages as there is room for. Head sizes share the size of a stage.
template <typename N, typename E>
void share_out(FewLayersArgs<typename N::Result>& args) {
  int widest = 0;
  for (const FewProduct& product : args.products) widest = std::max(widest, product.k);
  int pitch = few_x_pitch<N>(widest);
  if constexpr (kHasExperts<E>) {
    static_assert(few_sums<E>(1) <= few_sums<N>(1) && few_block<E>() == kFewExpertColumns);
    pitch = std::max({pitch, few_x_pitch<E>(widest), few_x_pitch<Plain<typename N::Result>>(widest)});
  }
  args.x_bytes = (args.rows * pitch + 127) / 128 * 128;
  const int room = kSharedOfBlock - kFewStatic - few_bytes_besides_rings<N>(args);
  args.stages = std::min(kFewMostStages, room / (kFewWarps * FewStage<N, E, 128>::kBytes));
}

// All blocks must live at once, as they wait for each other: a cooperative launch fails where they cannot.
template <typename N, typename E, int D>
void launch_few(const char* op, const FewLayersArgs<typename N::Result>& args, int32_t device, cudaStream_t stream) {
  allow_shared<few_layers_kernel<N, E, D>>(op, device, kSharedOfBlock - kFewStatic);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(device_attribute(cudaDevAttrMultiProcessorCount, device));
  config.blockDim = dim3(kFewLaunched);
  config.dynamicSmemBytes = few_bytes_besides_rings<N>(args) + args.stages * kFewWarps * FewStage<N, E, D>::kBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, few_layers_kernel<N, E, D>, args);  // its error is read by check_launch
}

// Of a mixture, with heads of 128. Compiled in a file of its own.
template <typename T>
void launch_mixture(const char* op, FewForm form, const FewLayersArgs<T>& args, int32_t device, cudaStream_t stream);

}  // namespace raylm::cuda
