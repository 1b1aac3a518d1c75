#include "raylm/cuda/logprobs.cuh"

#include "launch.h"

namespace raylm::cuda {
namespace {

void check_logits(const char* op, const Tensor& logits) {
  Arg(op, "logits", logits).floating().dim(2).last_contiguous();
  if (logits.size(1) < 1) fail(op, "logits has no columns");
  if (logits.size(1) > kMaxVocab) fail(op, "logits has ", logits.size(1), " columns, must have at most ", kMaxVocab);
}

// What row_strips_kernel leaves to the kernel after it.
struct Workspace {
  int64_t num_strips, num_groups;
  Tensor strips, groups;

  explicit Workspace(const Tensor& logits)
      : num_strips(divide_up(logits.size(1), kStrip)),
        num_groups(divide_up(logits.size(1), kGroup)),
        strips(torch::stable::new_empty(logits, {logits.size(0), num_strips * 4}, ScalarType::Float)),
        groups(torch::stable::new_empty(logits, {logits.size(0), num_groups}, ScalarType::Float)) {}
};

template <typename T>
RowParams<T> launch_strips(const Tensor& logits, const int64_t* token_ids, bool groups, const Workspace& space) {
  const RowParams<T> params{
      data<T>(logits), logits.stride(0), static_cast<int>(logits.size(1)), static_cast<int>(space.num_strips),
      static_cast<int>(space.num_groups), is_aligned(logits.data_ptr()) && logits.stride(0) % kVec<T> == 0,
      token_ids, data<StripSum>(space.strips), groups ? data<float>(space.groups) : nullptr};
  const dim3 grid(logits.size(0), divide_up(space.num_strips, kStripThreads / kWarp));
  launch_dependent(row_strips_kernel<T>, grid, dim3(kStripThreads), current_stream(logits), params);
  return params;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs(Tensor logits, Tensor token_ids, int64_t num_top) {
  const char* op = "token_logprobs";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  Arg(op, "token_ids", token_ids).dtype({ScalarType::Long}).dim(1).size(0, rows, "the rows of logits").contiguous();
  Arg(op, "token_ids", token_ids).on_device_of(logits);
  if (num_top < 0 || num_top > kMaxTop) fail(op, "num_top is ", num_top, ", must be from 0 to ", kMaxTop);
  if (num_top > logits.size(1)) {
    fail(op, "num_top is ", num_top, ", must be at most the ", logits.size(1), " columns of logits");
  }
  Tensor values = torch::stable::new_empty(logits, {rows}, ScalarType::Float);
  Tensor ranks = torch::stable::new_empty(token_ids, {rows});
  Tensor top_ids = torch::stable::new_empty(token_ids, {rows, num_top});
  Tensor top_values = torch::stable::new_empty(logits, {rows, num_top}, ScalarType::Float);
  if (rows > 0) {
    const Guard guard(logits.get_device_index());
    const Workspace space(logits);
    const TopOutputs out{data<float>(values), data<int64_t>(ranks), static_cast<int>(num_top), data<int64_t>(top_ids),
                         data<float>(top_values)};
    by_dtype(logits, [&](auto type) {
      using T = decltype(type);
      const RowParams<T> params = launch_strips<T>(logits, data<int64_t>(token_ids), num_top > 0, space);
      const dim3 grid(rows), block(kTopThreads);
      launch_dependent(token_logprobs_kernel<T>, grid, block, current_stream(logits), params, out);
    });
    check_launch(op);
  }
  return {values, ranks, top_ids, top_values};
}

Tensor gather_logprobs(Tensor logits, Tensor token_ids) {
  const char* op = "gather_logprobs";
  check_logits(op, logits);
  const int64_t rows = logits.size(0);
  Arg(op, "token_ids", token_ids).dtype({ScalarType::Long}).dim(2).size(0, rows, "the rows of logits");
  Arg(op, "token_ids", token_ids).last_contiguous().on_device_of(logits);
  const int64_t num = token_ids.size(1);
  Tensor values = torch::stable::new_empty(logits, {rows, num}, ScalarType::Float);
  if (values.numel() == 0) return values;
  const Guard guard(logits.get_device_index());
  const Workspace space(logits);
  by_dtype(logits, [&](auto type) {
    using T = decltype(type);
    const RowParams<T> params = launch_strips<T>(logits, nullptr, false, space);
    const int64_t* tokens = data<int64_t>(token_ids);
    const dim3 grid(rows), block(kTopThreads);
    launch_dependent(gather_logprobs_kernel<T>, grid, block, current_stream(logits), params, tokens,
                     token_ids.stride(0), num, data<float>(values));
  });
  check_launch(op);
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("token_logprobs", TORCH_BOX(&token_logprobs));
  m.impl("gather_logprobs", TORCH_BOX(&gather_logprobs));
}

}  // namespace raylm::cuda
