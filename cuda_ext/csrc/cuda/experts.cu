#include "experts.h"

#include <limits>

#include "raylm/cuda/expert_rows.cuh"
#include "raylm/cuda/grouped_linear.cuh"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "experts";
constexpr int kMostRows = 256;  // of a segment

Order unsorted(const Tensor& chosen, const Sizes& sizes) {
  const int pairs = static_cast<int>(sizes.pairs);
  return {std::nullopt, {nullptr, nullptr, data<int64_t>(chosen), pairs, 1}, nullptr, nullptr, pairs};
}

Order sort(const Tensor& chosen, const Sizes& sizes, cudaStream_t stream) {
  const int64_t segments = sizes.most_segments(), numbers = 4 + 4 * segments;
  Order order{torch::stable::new_empty(chosen, {numbers + 2 * sizes.pairs}, ScalarType::Int)};
  int* const memory = data<int>(*order.memory);
  OrderParams params{};
  params.chosen = data<int64_t>(chosen);
  params.num_segments = memory;
  params.segments = reinterpret_cast<Segment*>(memory + 4);
  params.places = memory + numbers;
  params.tokens = params.places + sizes.pairs;
  params.pairs = static_cast<int>(sizes.pairs);
  params.per_token = static_cast<int>(sizes.per_token);
  params.experts = static_cast<int>(sizes.experts);
  params.segment_rows = sizes.segment_rows;
  const size_t shared = kOrderWarps * sizes.experts * sizeof(int);
  const unsigned blocks = sizes.pairs < kOrderPairs ? 1 : kOrderBlocks;
  launch_dependent(order_kernel, {dim3(blocks), dim3(kOrderThreads), stream, shared, blocks}, params);
  order.segments = {params.segments, params.num_segments, nullptr, params.pairs, 1};
  order.places = params.places;
  order.tokens = params.tokens;
  order.most_segments = segments;
  return order;
}

template <typename T>
Tensor gather_sums_of(const Tensor& rows, const Tensor& weights, const Order& order, const Sizes& sizes,
                      cudaStream_t stream) {
  const Tensor out = torch::stable::new_empty(rows, {sizes.tokens, sizes.hidden});
  const unsigned threads = threads_for(sizes.hidden / kVec<T>, sizes.tokens < 64 ? 64 : 256);
  const dim3 grid(sizes.tokens, divide_up(sizes.hidden, threads * kVec<T>));
  launch_dependent(gather_sums_kernel<T>, grid, dim3(threads), stream, static_cast<const T*>(data<T>(rows)),
                   static_cast<const int*>(order.places), static_cast<const float*>(data<float>(weights)),
                   data<T>(out), static_cast<int>(sizes.per_token), static_cast<int>(sizes.hidden));
  return out;
}

}  // namespace

Order order_of(const Tensor& chosen, const Sizes& sizes, cudaStream_t stream) {
  return sizes.tokens > kUnsorted ? sort(chosen, sizes, stream) : unsorted(chosen, sizes);
}

Tensor spread(const Tensor& x, const Order& order, const Sizes& sizes, cudaStream_t stream) {
  if (!order.places) return x;
  const Tensor rows = torch::stable::new_empty(x, {sizes.pairs, sizes.hidden});
  SpreadParams params{};
  params.x = static_cast<const char*>(x.data_ptr());
  params.x_stride = x.stride(0) * 2;
  params.to = static_cast<char*>(rows.data_ptr());
  params.places = order.places;
  params.per_token = static_cast<int>(sizes.per_token);
  params.width = static_cast<int>(sizes.hidden * 2);
  launch_dependent(spread_kernel, dim3(sizes.tokens), dim3(threads_for(sizes.hidden / 8, 256)), stream, params);
  return rows;
}

Tensor gather_sums(const Tensor& rows, const Tensor& weights, const Order& order, const Sizes& sizes,
                   cudaStream_t stream) {
  return rows.scalar_type() == ScalarType::Half
             ? gather_sums_of<__half>(rows, weights, order, sizes, stream)
             : gather_sums_of<__nv_bfloat16>(rows, weights, order, sizes, stream);
}

ExpertGate expert_gate(const char* op, int64_t activation, double limit) {
  constexpr float kNoLimit = std::numeric_limits<float>::infinity();
  switch (activation) {
    case 0: return {Silu::kScale, 0, kNoLimit, 0};
    case 1: return {GeluTanh::kScale, GeluTanh::kCube, kNoLimit, 0};
    case 2: return {-1.702f * kLog2E, 0, static_cast<float>(limit), 1};  // GPT-OSS's
    default: fail(op, "activation is ", activation, ", must be from 0 to 2");
  }
}

void check_pairs(const char* op, const Tensor& x, const Tensor& weights, const Tensor& chosen) {
  Arg(op, "chosen", chosen).dtype({ScalarType::Long}).dim(2).size(0, x.size(0), "the rows of x").contiguous();
  Arg(op, "weights", weights).dtype({ScalarType::Float}).dim(2).size(0, x.size(0), "the rows of x").contiguous();
  Arg(op, "weights", weights).size(1, chosen.size(1), "as chosen");
  for (const Tensor* tensor : {&weights, &chosen}) Arg(op, "an argument", *tensor).on_device_of(x);
  if (x.size(0) * chosen.size(1) >= (1 << 30)) {
    fail(op, "x has ", x.size(0), " rows, too many for ", chosen.size(1), " experts each");
  }
}

namespace {

struct GroupedProduct {
  const Tensor& x;       // [tokens, k] of a gated product, otherwise [pairs, k] in the order of the experts
  const Tensor& weight;  // [experts, n, k]
  const std::optional<Tensor>& bias;
  const Order& order;
  const Sizes& sizes;
  std::optional<ExpertGate> gate;
  int64_t halves = gate ? 2 : 1;
  int64_t k = weight.size(2), columns = weight.size(1) / halves;
};

// Clusters that the device runs at a time, with as much shared memory as they are launched with.
template <typename T, typename Shape, bool Gated>
int resident(int device, int shared) {
  static DeviceNumber known;
  return known.of(device, [&] {
    const auto* kernel = reinterpret_cast<const void*>(grouped_linear_kernel<T, Shape, Gated, AsNumbers<T>>);
    return resident_clusters(kernel, Shape::kCluster, Shape::kThreads, shared);
  });
}

template <typename T, typename Shape, bool Gated>
void launch(const GroupedProduct& p, GroupedParams params, cudaStream_t stream) {
  constexpr bool kLooksUp = GroupedBlock<T, Shape, Gated, AsNumbers<T>>::kLooksUp, kSpreads = Gated && !kLooksUp;
  const Tensor x = kSpreads ? spread(p.x, p.order, p.sizes, stream) : p.x;
  params.early = !Gated || (kSpreads && p.order.places);  // otherwise the kernel ahead writes the segments
  const int device = x.get_device_index();
  const int64_t eights = p.columns / 8, box = Shape::kWidth / 8 / p.halves;
  const int stride = static_cast<int>(x.stride(0) / kVec<T>), width = static_cast<int>(p.k / kVec<T>);
  if (kLooksUp) params.token_rows = {static_cast<const char*>(x.data_ptr()), p.order.tokens, stride, width};
  const bool mapped =
      (kLooksUp || make_map<T, 2>(&params.x, data<T>(x), {p.k, x.size(0)}, {x.stride(0)}, {64, Shape::kBoxRows})) &&
      make_map<T, 5>(&params.weight, data<T>(p.weight), {p.k, 8, p.halves, eights, p.sizes.experts},
                     {p.k, p.columns * p.k, 8 * p.k, p.halves * p.columns * p.k}, {64, 8, p.halves, box, 1});
  if (!mapped) fail(kOp, "the copy engine cannot address the rows or the weights");
  params.column_tiles = static_cast<int>(divide_up(eights, box * Shape::kCluster));
  const int room = (Shape::kBlocks == 2 ? kSharedOfTwo : kSharedOfBlock) - 2048 - Shape::kResultBytes;
  params.stages = std::min(kMostGroupedStages, room / Shape::kStageBytes);
  const int shared = Shape::shared_bytes(params.stages);
  const int64_t tiles = p.order.most_segments * params.column_tiles;
  const int64_t clusters = std::min<int64_t>(tiles, resident<T, Shape, Gated>(device, shared));
  if (clusters == 0) fail(kOp, "its kernel needs ", shared, " bytes of shared memory a block, which this device has not");
  launch_dependent(grouped_linear_kernel<T, Shape, Gated, AsNumbers<T>>,
                   {dim3(clusters * Shape::kCluster), dim3(Shape::kThreads), stream, static_cast<size_t>(shared),
                    static_cast<unsigned>(Shape::kCluster)},
                   params);
}

template <typename T, bool Gated>
void launch(const GroupedProduct& p, const GroupedParams& params, cudaStream_t stream) {
  switch (p.sizes.segment_rows) {
    case 8: return launch<T, GroupedShape<64, 8, 1>, Gated>(p, params, stream);
    case 16: return launch<T, GroupedShape<64, 16, 1>, Gated>(p, params, stream);
    case 32: return launch<T, GroupedShape<128, 32, 1>, Gated>(p, params, stream);
    case 64: return launch<T, GroupedShape<128, 64, 1>, Gated>(p, params, stream);
    // Without a cluster a gated product looks rows up (GroupedBlock::kLooksUp).
    case 128: return launch<T, GroupedShape<128, 128, 2, Gated ? 1 : 2>, Gated>(p, params, stream);
    default: return launch<T, GroupedShape<128, 256, 2>, Gated>(p, params, stream);
  }
}

// Each row times its expert's weight, and the activation: [pairs, columns].
template <typename T>
Tensor product(const GroupedProduct& p, cudaStream_t stream) {
  const Tensor out = torch::stable::new_empty(p.x, {p.sizes.pairs, p.columns});
  GroupedParams params{};
  params.segments = p.order.segments;
  params.segments.share = static_cast<int>(p.sizes.pairs / p.x.size(0));
  params.bias = p.bias ? data<T>(*p.bias) : nullptr;
  params.out = out.data_ptr();
  params.columns = static_cast<int>(p.columns);
  params.steps = static_cast<int>(divide_up(p.k, 64));
  if (p.gate) params.gate = *p.gate;
  p.halves == 2 ? launch<T, true>(p, params, stream) : launch<T, false>(p, params, stream);
  return out;
}

void check(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights, const Tensor& chosen) {
  Arg(kOp, "x", x).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).last_contiguous();
  const int64_t experts = down.dim() == 3 ? down.size(0) : 0, size = down.dim() == 3 ? down.size(2) : 0;
  Arg(kOp, "down", down).dtype({x.scalar_type()}).dim(3).size(1, x.size(1), "the columns of x").contiguous();
  Arg(kOp, "gate_up", gate_up).dtype({x.scalar_type()}).dim(3).size(0, experts, "the experts of down").contiguous();
  Arg(kOp, "gate_up", gate_up).size(1, 2 * size, "twice the columns of down").size(2, x.size(1), "the columns of x");
  for (const Tensor* tensor : {&gate_up, &down}) Arg(kOp, "an argument", *tensor).on_device_of(x);
  check_pairs(kOp, x, weights, chosen);
}

void check_bias(const char* name, const Tensor& bias, const Tensor& weight) {
  Arg(kOp, name, bias).dtype({weight.scalar_type()}).dim(2).size(0, weight.size(0), "the experts").contiguous();
  Arg(kOp, name, bias).size(1, weight.size(1), "the rows of an expert's weight").on_device_of(weight);
}

// Whether experts takes such rows and weights on their device.
bool experts_kernels(Tensor x, Tensor down) {
  const bool aligned = is_aligned(x.data_ptr()) && x.stride(0) % 8 == 0 && is_aligned(down.data_ptr());
  return kHopperKernels && compute_major(x.get_device_index()) == 9 && x.scalar_type() != ScalarType::Float && aligned &&
         down.size(0) <= kMostExperts && down.size(1) % 8 == 0 && down.size(2) % 8 == 0 && down.size(2) > 0;
}

template <typename T>
Tensor run(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& weights, const Tensor& chosen,
           const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias, const ExpertGate& gate) {
  const Sizes sizes{x.size(0), chosen.size(1), down.size(0), x.size(1), down.size(2), kMostRows};
  const cudaStream_t stream = current_stream(x);
  const Order order = order_of(chosen, sizes, stream);
  const Tensor inner = product<T>({x, gate_up, gate_up_bias, order, sizes, gate}, stream);
  const Tensor parts = product<T>({inner, down, down_bias, order, sizes, std::nullopt}, stream);
  return gather_sums(parts, weights, order, sizes, stream);
}

Tensor experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor chosen, std::optional<Tensor> gate_up_bias,
               std::optional<Tensor> down_bias, int64_t activation, double limit) {
  check(x, gate_up, down, weights, chosen);
  if (gate_up_bias) check_bias("gate_up_bias", *gate_up_bias, gate_up);
  if (down_bias) check_bias("down_bias", *down_bias, down);
  const ExpertGate gate = expert_gate(kOp, activation, limit);
  if (!experts_kernels(x, down)) fail(kOp, "has no kernel for such weights here: ask experts_kernels");
  if (x.size(0) == 0) return torch::stable::new_empty(x, {0, x.size(1)});
  const Guard guard(x.get_device_index());
  const auto of = [&](auto type) {
    return run<decltype(type)>(x, gate_up, down, weights, chosen, gate_up_bias, down_bias, gate);
  };
  const Tensor out = x.scalar_type() == ScalarType::Half ? of(__half{}) : of(__nv_bfloat16{});
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("experts", TORCH_BOX(&experts));
  m.impl("experts_kernels", TORCH_BOX(&experts_kernels));
}

}  // namespace raylm::cuda
