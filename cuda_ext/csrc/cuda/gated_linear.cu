#include "raylm/cuda/gated_linear.cuh"

#include <algorithm>

#include "products.h"
#include "shapes.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr int64_t kManyRows = 1024;  // an H200, 4096 -> 14336: 0.95 of the two kernels' time; at 512 rows, 1.05
constexpr int kCluster = 2;          // blocks that share the fetching of weights
constexpr int kBandRows = 2048;      // rows that go through all weights before the next ones do; they stay in the L2 cache

bool fits(const Product& p) {
  using Shape = GatedShape;
  const int64_t depth = p.k * (p.scales ? 1 : 2);
  return kHopperKernels && !p.bias && p.rows >= kManyRows && p.rows <= (1 << 24) && p.n <= (1 << 24) && p.k > 0 &&
         depth % Shape::kDepth == 0 && p.n > 0 && p.n % (2 * Shape::kColumns) == 0 && is_aligned(p.x.data_ptr()) &&
         is_aligned(p.weight.data_ptr()) && p.x.scalar_type() != ScalarType::Float &&
         compute_major(p.x.get_device_index()) == 9;
}

template <typename N>
bool make_params(GatedLinearParams& params, const Product& p, const Tensor& out) {
  using Shape = GatedShape;
  using Stored = typename N::Stored;
  constexpr int64_t kDepth = Shape::kDepth / sizeof(Stored);
  const int64_t columns = p.n / 2;
  params.rows = static_cast<int>(p.rows);
  params.columns = static_cast<int>(columns);
  params.steps = static_cast<int>(p.k / kDepth);
  params.band = kBandRows / (kCluster * Shape::kRows);
  if (p.scales) params.x_scales = data<float>(*p.x_scales), params.scales = data<float>(*p.scales);
  const auto* x = data<Stored>(p.x);
  const auto* weight = data<Stored>(p.weight);
  auto* to = data<typename N::Result>(out);
  return make_map<Stored, 2>(&params.x, x, {p.k, p.rows}, {p.x_stride}, {kDepth, Shape::kRows}) &&
         make_map<Stored, 2>(&params.weight, weight, {p.k, p.n}, {p.weight.stride(0)}, {kDepth, Shape::kColumns}) &&
         make_map<typename N::Result, 2>(&params.out, to, {columns, p.rows}, {columns}, {64, 64});
}

template <typename N, typename Act>
void launch(const GatedLinearParams& params, int32_t device, cudaStream_t stream) {
  using Shape = GatedShape;
  constexpr auto* kernel = gated_linear_kernel<N, Act, kCluster>;
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

// Nothing where the copy engine cannot address a tensor.
template <typename N>
std::optional<Tensor> run(const Product& p, bool gelu_tanh) {
  const int32_t device = p.x.get_device_index();
  const Guard guard(device);
  const Tensor out = new_rows(p.x, p.n / 2, p.result);
  GatedLinearParams params{};
  if (!make_params<N>(params, p, out)) return std::nullopt;
  const auto stream = current_stream(p.x);
  gelu_tanh ? launch<N, GeluTanh>(params, device, stream) : launch<N, Silu>(params, device, stream);
  check_launch("gated_linear");
  return out;
}

// Where no kernel does both: the product, and then the activation.
Tensor gated_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool gelu_tanh, bool frozen) {
  check_gated_linear(x, weight, bias.has_value() ? &*bias : nullptr);
  Arg("gated_linear", "weight", weight).on_device_of(x);
  const Product product{x, weight, bias, frozen};
  std::optional<Tensor> out = many_gated_linear(product, gelu_tanh);
  if (!out) out = fused_gated_linear(product, gelu_tanh);
  if (out) return *out;
  const Tensor both = linear(x, weight, bias, frozen);
  return gelu_tanh ? gelu_tanh_mul(both) : silu_mul(both);
}

}  // namespace

std::optional<Tensor> many_gated_linear(const Product& product, bool gelu_tanh) {
  if (!fits(product)) return std::nullopt;
  const bool half = product.result == ScalarType::Half;
  if (product.scales) {
    return half ? run<Scaled<__half>>(product, gelu_tanh) : run<Scaled<__nv_bfloat16>>(product, gelu_tanh);
  }
  return half ? run<Plain<__half>>(product, gelu_tanh) : run<Plain<__nv_bfloat16>>(product, gelu_tanh);
}

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("gated_linear", TORCH_BOX(&gated_linear)); }

}  // namespace raylm::cuda
