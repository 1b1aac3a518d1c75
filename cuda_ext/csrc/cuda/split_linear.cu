#include "raylm/cuda/split_linear.cuh"

#include <algorithm>

#include "products.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr int kMostSplitRows = 64;
constexpr int kTileCost = 1, kMeetingCost = 2;  // in steps, about

// Of a weight: torch's library is as fast or faster with larger ones (H200).
int64_t most_bytes(int64_t rows) { return (rows <= 16 ? 64 : rows <= 32 ? 40 : 8) << 20; }

struct SplitPlan {
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
void consider(SplitPlan& plan, int64_t n, int64_t k, int device) {
  const int block_steps = static_cast<int>(divide_up(divide_up(k, kSplitStep), Cluster));
  const int tiles = static_cast<int>(divide_up(n, kSplitTile));
  const int shared = SplitLayout<Rows, Cluster>::bytes(block_steps);
  if (shared > kDynamicOfBlock) return;
  const int clusters = std::min(tiles, resident<T, Rows, Cluster>(device));
  if (clusters == 0) return;
  const int cost = divide_up(tiles, clusters) * (block_steps + (Cluster == 1 ? kTileCost : kMeetingCost));
  if (plan.clusters == 0 || cost < plan.cost) plan = {Cluster, clusters, block_steps, shared, cost};
}

template <typename T, int Rows, int Cluster>
void launch(const SplitLinearParams<T>& params, const SplitPlan& plan, cudaStream_t stream) {
  const dim3 grid(plan.clusters * Cluster);
  launch_dependent(split_linear_kernel<T, Rows, Cluster>,
                   {grid, dim3(kSplitThreads), stream, static_cast<size_t>(plan.shared), Cluster}, params);
}

template <typename T, int Rows>
std::optional<Tensor> run(const Product& p) {
  const int device = p.x.get_device_index();
  SplitPlan plan{};
  consider<T, Rows, 1>(plan, p.n, p.k, device);
  consider<T, Rows, 2>(plan, p.n, p.k, device);
  consider<T, Rows, 4>(plan, p.n, p.k, device);
  consider<T, Rows, 8>(plan, p.n, p.k, device);
  SplitLinearParams<T> params{};
  if (plan.clusters == 0 || !make_map<T, 2>(&params.x, data<T>(p.x), {p.k, p.rows}, {p.x_stride}, {64, Rows}) ||
      !make_map<T, 2>(&params.weight, data<T>(p.weight), {p.k, p.n}, {p.weight.stride(0)}, {64, kSplitTile})) {
    return std::nullopt;
  }
  const cudaStream_t stream = current_stream(p.x);
  Tensor out = new_rows(p.x, p.n);
  params.bias = p.bias ? data<T>(*p.bias) : nullptr;
  params.out = data<T>(out);
  params.rows = static_cast<int>(p.rows), params.n = static_cast<int>(p.n);
  params.tiles = static_cast<int>(divide_up(p.n, kSplitTile));
  params.steps = static_cast<int>(divide_up(p.k, kSplitStep)), params.block_steps = plan.block_steps;
  params.early = p.frozen;
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
std::optional<Tensor> run(const Product& product) {
  if (product.rows <= 16) return run<T, 16>(product);
  if (product.rows <= 32) return run<T, 32>(product);
  return run<T, 64>(product);
}

}  // namespace

std::optional<Tensor> split_linear(const Product& p) {
  const bool fits = p.n >= 8 && p.n % 8 == 0 && p.k >= 64 && p.k % 8 == 0 && 2 * p.n * p.k <= most_bytes(p.rows);
  if (!kHopperKernels || p.rows < 1 || p.rows > kMostSplitRows || !fits) return std::nullopt;
  const Guard guard(p.x.get_device_index());
  return p.x.scalar_type() == ScalarType::Half ? run<__half>(p) : run<__nv_bfloat16>(p);
}

}  // namespace raylm::cuda
