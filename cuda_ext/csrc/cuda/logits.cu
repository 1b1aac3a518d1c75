#include "raylm/cuda/logits.cuh"

#include "launch.h"

namespace raylm::cuda {
namespace {

void mask_logits(Tensor logits, Tensor bitmask, Tensor mask_rows) {
  const char* op = "mask_logits";
  Arg(op, "logits", logits).floating().dim(2).last_contiguous();
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  if (vocab > kMaxGridY * kMaskSlice) {
    fail(op, "logits has ", vocab, " columns, must have at most ", kMaxGridY * kMaskSlice);
  }
  Arg(op, "bitmask", bitmask).dtype({ScalarType::Int}).dim(2).last_contiguous().on_device_of(logits);
  Arg(op, "bitmask", bitmask).size(1, divide_up(vocab, 32), "32 columns of logits a word");
  Arg(op, "mask_rows", mask_rows).dtype({ScalarType::Long}).dim(1).size(0, rows, "the rows of logits").contiguous();
  Arg(op, "mask_rows", mask_rows).on_device_of(logits);
  if (logits.numel() == 0 || bitmask.size(0) == 0) return;
  const Guard guard(logits.get_device_index());
  by_dtype(logits, [&](auto type) {
    using T = decltype(type);
    const MaskParams<T> params{data<T>(logits), logits.stride(0), vocab,
                               data<int32_t>(bitmask), bitmask.stride(0), bitmask.size(0), data<int64_t>(mask_rows),
                               is_aligned(logits.data_ptr()) && logits.stride(0) % kVec<T> == 0};
    const dim3 grid(rows, divide_up(vocab, kMaskSlice));
    launch_dependent(mask_logits_kernel<T>, grid, dim3(kMaskThreads), current_stream(logits), params);
  });
  check_launch(op);
}

void bias_logits(Tensor logits, Tensor table_rows, Tensor ids, Tensor values, Tensor counts) {
  const char* op = "bias_logits";
  Arg(op, "logits", logits).floating().dim(2).last_contiguous();
  const int64_t rows = logits.size(0);
  Arg(op, "table_rows", table_rows).dtype({ScalarType::Long}).dim(1).size(0, rows, "the rows of logits").contiguous();
  Arg(op, "table_rows", table_rows).on_device_of(logits);
  Arg(op, "ids", ids).dtype({ScalarType::Int}).dim(2).last_contiguous().on_device_of(logits);
  Arg(op, "values", values).dtype({ScalarType::Float}).dim(2).last_contiguous().on_device_of(logits);
  Arg(op, "values", values).size(0, ids.size(0), "the rows of ids").size(1, ids.size(1), "the columns of ids");
  Arg(op, "counts", counts).dtype({ScalarType::Int}).dim(1).size(0, ids.size(0), "the rows of ids").contiguous();
  Arg(op, "counts", counts).on_device_of(logits);
  if (logits.numel() == 0 || ids.numel() == 0) return;
  const Guard guard(logits.get_device_index());
  by_dtype(logits, [&](auto type) {
    using T = decltype(type);
    const BiasParams<T> params{data<T>(logits), logits.stride(0), logits.size(1), data<int64_t>(table_rows),
                               data<int32_t>(ids), ids.stride(0), data<float>(values), values.stride(0),
                               data<int32_t>(counts), ids.size(0), ids.size(1)};
    launch_dependent(bias_logits_kernel<T>, dim3(rows), dim3(kBiasThreads), current_stream(logits), params);
  });
  check_launch(op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("mask_logits", TORCH_BOX(&mask_logits));
  m.impl("bias_logits", TORCH_BOX(&bias_logits));
}

}  // namespace raylm::cuda
