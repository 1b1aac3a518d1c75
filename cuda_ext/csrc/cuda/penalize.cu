#include "launch.h"
#include "raylm/cuda/penalize.cuh"

namespace raylm::cuda {
namespace {

constexpr const char* kPenalize = "penalize";

void check(const Tensor& logits, const Tensor& token_ids, const std::pair<const char*, const Tensor*> (&settings)[6]) {
  Arg(kPenalize, "logits", logits).floating().dim(2).last_contiguous();
  if (logits.size(1) > kMaxGridY * kPenalizeSlice) {
    fail(kPenalize, "logits has ", logits.size(1), " columns, must have at most ", kMaxGridY * kPenalizeSlice);
  }
  Arg(kPenalize, "token_ids", token_ids).dtype({ScalarType::Int}).dim(2).last_contiguous().on_device_of(logits);
  for (int i = 0; i < 6; ++i) {
    const auto& [name, tensor] = settings[i];
    Arg(kPenalize, name, *tensor).dtype({i < 3 ? ScalarType::Long : ScalarType::Float}).dim(1).contiguous();
    Arg(kPenalize, name, *tensor).size(0, logits.size(0), "the rows of logits").on_device_of(logits);
  }
}

template <typename T>
void launch(const PenalizeParams<T>& params, int64_t rows, cudaStream_t stream) {
  const dim3 grid(rows, divide_up(params.vocab, kPenalizeSlice));
  launch_dependent(penalize_kernel<T>, grid, dim3(kPenalizeThreads), stream, params);
}

Tensor penalize(Tensor logits, Tensor token_ids, Tensor rows, Tensor prompt_lens, Tensor seq_lens, Tensor repetition,
                Tensor frequency, Tensor presence) {
  check(logits, token_ids,
        {{"rows", &rows}, {"prompt_lens", &prompt_lens}, {"seq_lens", &seq_lens}, {"repetition", &repetition},
         {"frequency", &frequency}, {"presence", &presence}});
  Tensor out = torch::stable::new_empty(logits, logits.sizes());
  if (out.numel() == 0) return out;
  const int64_t vocab = logits.size(1);
  const Guard guard(logits.get_device_index());
  by_dtype(logits, [&](auto type) {
    using T = decltype(type);
    const bool vectors = is_aligned(logits.data_ptr()) && is_aligned(out.data_ptr()) &&
                         logits.stride(0) % kVec<T> == 0 && vocab % kVec<T> == 0;
    const PenalizeParams<T> params{
        data<T>(logits), logits.stride(0), vocab,
        data<int32_t>(token_ids), token_ids.stride(0), token_ids.size(0), token_ids.size(1),
        data<int64_t>(rows), data<int64_t>(prompt_lens), data<int64_t>(seq_lens),
        data<float>(repetition), data<float>(frequency), data<float>(presence), data<T>(out), vectors};
    launch(params, logits.size(0), current_stream(logits));
  });
  check_launch(kPenalize);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("penalize", TORCH_BOX(&penalize)); }

}  // namespace raylm::cuda
