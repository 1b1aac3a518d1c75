#include "raylm/cuda/gated_linear.cuh"

#include <algorithm>

#include "products.h"
#include "shapes.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr const char* kGatedLinear = "gated_linear";
constexpr int64_t kManyRows = 1024;  // an H200, 4096 -> 14336: 0.95 of the two kernels' time; at 512 rows, 1.05
constexpr int kCluster = 2;          // blocks that share the fetching of weights
constexpr int kBandRows = 2048;      // rows that go through all weights before the next ones do; they stay in the L2 cache

bool has_kernel(const Tensor& x) {
  return kHopperKernels && x.scalar_type() != ScalarType::Float && compute_major(x.get_device_index()) == 9;
}

bool fits(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using Shape = GatedShape;
  return !bias.has_value() && x.size(0) >= kManyRows && x.size(0) <= (1 << 24) && weight.size(0) <= (1 << 24) &&
         x.size(1) > 0 && x.size(1) % Shape::kDepth == 0 && weight.size(0) > 0 &&
         weight.size(0) % (2 * Shape::kColumns) == 0 && is_aligned(x.data_ptr()) && is_aligned(weight.data_ptr()) &&
         has_kernel(x);
}

template <typename T>
bool make_params(GatedLinearParams& params, const Tensor& x, const Tensor& weight, const Tensor& out) {
  using Shape = GatedShape;
  const int64_t rows = x.size(0), depth = x.size(1), columns = out.size(1);
  params.rows = static_cast<int>(rows);
  params.columns = static_cast<int>(columns);
  params.steps = static_cast<int>(depth / Shape::kDepth);
  params.band = kBandRows / (kCluster * Shape::kRows);
  return make_map<T, 2>(&params.x, data<T>(x), {depth, rows}, {x.stride(0)}, {Shape::kDepth, Shape::kRows}) &&
         make_map<T, 2>(&params.weight, data<T>(weight), {depth, 2 * columns}, {weight.stride(0)},
                        {Shape::kDepth, Shape::kColumns}) &&
         make_map<T, 2>(&params.out, data<T>(out), {columns, rows}, {columns}, {64, 64});
}

template <typename T, typename Act>
void launch(const GatedLinearParams& params, int32_t device, cudaStream_t stream) {
  using Shape = GatedShape;
  constexpr auto* kernel = gated_linear_kernel<T, Act, kCluster>;
  allow_shared<kernel>("gated_linear", device, Shape::kSharedBytes);
  constexpr int kSlab = kCluster * Shape::kRows;
  const int tiles = divide_up(params.rows, kSlab) * (params.columns / Shape::kColumns);
  const int clusters = std::min(tiles, device_attribute(cudaDevAttrMultiProcessorCount, device) / kCluster);
  cudaLaunchAttribute cluster = cluster_attribute(kCluster);
  cudaLaunchConfig_t config{};
  config.gridDim = clusters * kCluster;
  config.blockDim = Shape::kThreads;
  config.dynamicSmemBytes = Shape::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, params);  // its error is read by check_launch
}

// False where the copy engine cannot address a tensor: nothing has been launched.
template <typename T>
bool run(const Tensor& x, const Tensor& weight, bool gelu_tanh, const Tensor& out) {
  GatedLinearParams params;
  if (!make_params<T>(params, x, weight, out)) return false;
  const int32_t device = x.get_device_index();
  const auto stream = current_stream(x);
  gelu_tanh ? launch<T, GeluTanh>(params, device, stream) : launch<T, Silu>(params, device, stream);
  check_launch(kGatedLinear);
  return true;
}

// Where no kernel does both: the product, and then the activation.
Tensor gated_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool gelu_tanh, bool frozen) {
  check_gated_linear(x, weight, bias.has_value() ? &*bias : nullptr);
  Arg(kGatedLinear, "weight", weight).on_device_of(x);
  if (fits(x, weight, bias)) {
    const Guard guard(x.get_device_index());
    const Tensor out = new_rows(x, weight.size(0) / 2);
    const bool done = x.scalar_type() == ScalarType::Half ? run<__half>(x, weight, gelu_tanh, out)
                                                          : run<__nv_bfloat16>(x, weight, gelu_tanh, out);
    if (done) return out;
  }
  if (const std::optional<Tensor> out = fused_gated_linear({x, weight, bias, frozen}, gelu_tanh)) return *out;
  const Tensor product = linear(x, weight, bias, frozen);
  return gelu_tanh ? gelu_tanh_mul(product) : silu_mul(product);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("gated_linear", TORCH_BOX(&gated_linear)); }

}  // namespace raylm::cuda
