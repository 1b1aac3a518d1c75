#include "raylm/cuda/split_linear.cuh"

#include <algorithm>

#include "products.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr int kMostRows = 64;
constexpr int kTileCost = 1, kMeetingCost = 2;  // in steps, about

// Of a weight: torch's library is as fast or faster with larger ones (H200).
int64_t most_bytes(int64_t rows) { return (rows <= 16 ? 64 : rows <= 32 ? 40 : 8) << 20; }

struct Plan {
  int cluster, clusters, block_steps, shared;
  int cost;  // of a block: its steps of k, and what its tiles cost besides, in such steps
};

template <typename T, int Rows, int Cluster>
int resident(int device) {
  static DeviceNumber known;
  return known.of(device, [] {
    const auto* kernel = reinterpret_cast<const void*>(split_linear_kernel<T, Rows, Cluster>);
    return resident_clusters(kernel, Cluster, kSplitThreads, kDynamicOfBlock);
  });
}

// Replaces the plan where x has room in the blocks' shared memory and the cost is lower.
template <typename T, int Rows, int Cluster>
void consider(Plan& plan, int64_t n, int64_t k, int device) {
  const int block_steps = static_cast<int>(divide_up(divide_up(k, kSplitStep), Cluster));
  const int tiles = static_cast<int>(divide_up(n, kSplitTile));
  const int shared = SplitLayout<Rows>::bytes(block_steps);
  if (shared > kDynamicOfBlock) return;
  const int clusters = std::min(tiles, resident<T, Rows, Cluster>(device));
  if (clusters == 0) return;
  const int cost = divide_up(tiles, clusters) * (block_steps + (Cluster == 1 ? kTileCost : kMeetingCost));
  if (plan.clusters == 0 || cost < plan.cost) plan = {Cluster, clusters, block_steps, shared, cost};
}

template <typename T, int Rows, int Cluster>
void launch(const SplitLinearParams<T>& params, const Plan& plan, cudaStream_t stream) {
  const dim3 grid(plan.clusters * Cluster);
  launch_dependent(split_linear_kernel<T, Rows, Cluster>,
                   {grid, dim3(kSplitThreads), stream, static_cast<size_t>(plan.shared), Cluster}, params);
}

template <typename T, int Rows>
std::optional<Tensor> run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t rows,
                          int64_t x_stride) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const int device = x.get_device_index();
  Plan plan{};
  consider<T, Rows, 1>(plan, n, k, device);
  consider<T, Rows, 2>(plan, n, k, device);
  consider<T, Rows, 4>(plan, n, k, device);
  consider<T, Rows, 8>(plan, n, k, device);
  SplitLinearParams<T> params{};
  if (plan.clusters == 0 || !make_map<T, 2>(&params.x, data<T>(x), {k, rows}, {x_stride}, {64, Rows}) ||
      !make_map<T, 2>(&params.weight, data<T>(weight), {k, n}, {weight.stride(0)}, {64, kSplitTile})) {
    return std::nullopt;
  }
  const cudaStream_t stream = current_stream(x);
  Tensor out = new_rows(x, n);
  params.bias = bias ? data<T>(*bias) : nullptr;
  params.out = data<T>(out);
  params.rows = static_cast<int>(rows), params.n = static_cast<int>(n);
  params.tiles = static_cast<int>(divide_up(n, kSplitTile));
  params.steps = static_cast<int>(divide_up(k, kSplitStep)), params.block_steps = plan.block_steps;
  params.early = reads_early(stream);
  switch (plan.cluster) {
    case 1: launch<T, Rows, 1>(params, plan, stream); break;
    case 2: launch<T, Rows, 2>(params, plan, stream); break;
    case 4: launch<T, Rows, 4>(params, plan, stream); break;
    default: launch<T, Rows, 8>(params, plan, stream);
  }
  check_launch("linear");
  return out;
}

template <typename T>
std::optional<Tensor> run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t rows,
                          int64_t x_stride) {
  if (rows <= 16) return run<T, 16>(x, weight, bias, rows, x_stride);
  if (rows <= 32) return run<T, 32>(x, weight, bias, rows, x_stride);
  return run<T, 64>(x, weight, bias, rows, x_stride);
}

}  // namespace

std::optional<Tensor> split_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                   int64_t rows, int64_t x_stride) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const bool fits = n >= 8 && n % 8 == 0 && k >= 64 && k % 8 == 0 && 2 * n * k <= most_bytes(rows);
  if (!kHopperKernels || rows < 1 || rows > kMostRows || !fits) return std::nullopt;
  const Guard guard(x.get_device_index());
  return x.scalar_type() == ScalarType::Half ? run<__half>(x, weight, bias, rows, x_stride)
                                             : run<__nv_bfloat16>(x, weight, bias, rows, x_stride);
}

}  // namespace raylm::cuda
