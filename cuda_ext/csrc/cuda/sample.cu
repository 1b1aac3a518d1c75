#include "launch.h"
#include "raylm/cuda/sample.cuh"

namespace raylm::cuda {
namespace {

constexpr const char* kSample = "sample";

void check(const Tensor& logits, const std::pair<const char*, const Tensor*> (&settings)[6]) {
  Arg(kSample, "logits", logits).floating().dim(2).last_contiguous();
  if (logits.size(1) < 1) fail(kSample, "logits has no columns");
  for (const auto& [name, tensor] : settings) {
    const bool real = tensor == settings[0].second || tensor == settings[2].second || tensor == settings[3].second;
    Arg(kSample, name, *tensor).dtype({real ? ScalarType::Float : ScalarType::Long}).dim(1).contiguous();
    Arg(kSample, name, *tensor).size(0, logits.size(0), "the rows of logits").on_device_of(logits);
  }
}

// Bytes of dynamic shared memory that a block may have.
int most_bytes(int device) {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) -
         static_cast<int>(sizeof(SampleExchange) + sizeof(SampleScratch));
}

// A row's logits lie in the shared memory of a cluster's blocks.
int64_t most_columns(int device) {
  constexpr int kUnit = kSampleWarps * kSegmentUnit;
  if (compute_major(device) < 9) return 0;
  return most_bytes(device) / static_cast<int>(sizeof(float)) / kUnit * kUnit * kSampleCtas;
}

template <typename T>
void launch(const SampleParams& params, int64_t rows, int device, cudaStream_t stream) {
  const int bytes = kSampleWarps * params.segment * static_cast<int>(sizeof(float)), most = most_bytes(device);
  allow_shared<sample_kernel<T>>(kSample, device, most);
  const dim3 grid(rows * kSampleCtas), block(kSampleThreads);
  launch_dependent(sample_kernel<T>, {grid, block, stream, static_cast<size_t>(bytes), kSampleCtas}, params);
}

Tensor sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed,
              Tensor position) {
  check(logits, {{"temperature", &temperature}, {"top_k", &top_k}, {"top_p", &top_p}, {"min_p", &min_p},
                 {"seed", &seed}, {"position", &position}});
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  const int device = logits.get_device_index();
  if (vocab > most_columns(device)) {
    fail(kSample, "logits has ", vocab, " columns, must have at most ", most_columns(device), " on this device");
  }
  Tensor token_ids = torch::stable::new_empty(seed, seed.sizes());
  if (rows == 0) return token_ids;
  const int64_t unit = kRowWarps * kSegmentUnit;
  const Guard guard(device);
  by_dtype(logits, [&](auto type) {
    using T = decltype(type);
    const SampleParams params{
        logits.data_ptr(), logits.stride(0), static_cast<int>(vocab),
        static_cast<int>(divide_up(vocab, unit) * kSegmentUnit),
        is_aligned(logits.data_ptr()) && logits.stride(0) % kVec<T> == 0,
        data<float>(temperature), data<float>(top_p), data<float>(min_p),
        data<int64_t>(top_k), data<int64_t>(seed), data<int64_t>(position), data<int64_t>(token_ids)};
    launch<T>(params, rows, device, current_stream(logits));
  });
  check_launch(kSample);
  return token_ids;
}

int64_t sample_columns(Tensor like) { return most_columns(like.get_device_index()); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("sample_columns", TORCH_BOX(&sample_columns));
}

}  // namespace raylm::cuda
