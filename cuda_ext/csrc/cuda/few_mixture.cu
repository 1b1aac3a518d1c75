#include "few_layers.h"

namespace raylm::cuda {

template <typename T>
void launch_mixture(const char* op, FewForm form, const FewLayersArgs<T>& args, int32_t device, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (form == FewForm::kScaled) return launch_few<Scaled<T>, FewFp8<T>, 128>(op, args, device, stream);
    if (form == FewForm::kFp8) return launch_few<FewFp8<T>, FewFp8<T>, 128>(op, args, device, stream);
  }
  if (form == FewForm::kInt4) return launch_few<FewInt4<T>, FewInt4Experts<T>, 128>(op, args, device, stream);
  launch_few<Plain<T>, Plain<T>, 128>(op, args, device, stream);
}

template void launch_mixture(const char*, FewForm, const FewLayersArgs<__nv_bfloat16>&, int32_t, cudaStream_t);
template void launch_mixture(const char*, FewForm, const FewLayersArgs<__half>&, int32_t, cudaStream_t);

}  // namespace raylm::cuda
