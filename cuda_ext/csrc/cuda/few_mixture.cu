#include "few_layers.h"

namespace raylm::cuda {

template <typename T>
void launch_mixture(const char* op, FewForm form, const FewLayersArgs<T>& args, int32_t device, cudaStream_t stream) {
  with_weights<T>(form, 128, true, [&](auto attention, auto experts) {
    using E = decltype(experts);
    if constexpr (kHasExperts<E>) launch_few<decltype(attention), E, 128>(op, args, device, stream);
  });
}

template void launch_mixture(const char*, FewForm, const FewLayersArgs<__nv_bfloat16>&, int32_t, cudaStream_t);
template void launch_mixture(const char*, FewForm, const FewLayersArgs<__half>&, int32_t, cudaStream_t);

}  // namespace raylm::cuda
