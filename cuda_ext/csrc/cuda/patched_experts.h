// Mixtures of experts whose weights are codes in patches: what launches the kernels of a form. Integers, floats, codes
// with offsets and those that round x are compiled in four files, side by side.
#pragma once

#include "experts.h"
#include "raylm/cuda/grouped_linear.cuh"
#include "rounded_rows.h"
#include "tensor_map.h"

namespace raylm::cuda {

constexpr const char* kCodedExperts = "patched_experts";
constexpr int kMostCodedRows = 128;   // of a segment
static_assert(kUnsorted <= kMostUnroundedByIntegers && kUnsorted <= kMostUnroundedByFloats);  // rows rounded have places
constexpr int kMostNarrowPairs = 32;  // (token, expert) pairs up to which narrow tiles are faster (H100)

struct CodedProduct {
  const Tensor& x;       // [rows, k], in the order of the experts or one a token; where it is rounded, whole patches
  const Tensor& weight;  // [experts, n / 16, bytes of patches beside each other]
  const std::optional<Tensor>& bias;
  const Order& order;
  const Sizes& sizes;
  int group_log2;
  std::optional<ExpertGate> gate;
  const Tensor* scales = nullptr;  // of rows of x that are rounded
  int64_t halves = gate ? 2 : 1;
  int64_t k = x.size(1), columns = weight.size(1) * 16 / halves, across = divide_up(k, kPatchColumns);
};

// Clusters that the device runs at a time.
template <typename Shape, bool Gated, typename T, template <typename> typename Form>
int resident_grouped(int device, int shared) {
  static DeviceNumber known;
  return known.of(device, [&] {
    const auto* kernel = reinterpret_cast<const void*>(grouped_linear_kernel<T, Shape, Gated, Form<T>>);
    return resident_clusters(kernel, Shape::kCluster, Shape::kThreads, shared);
  });
}

template <typename Shape, bool Gated, typename T, template <typename> typename Form>
void launch_grouped(const CodedProduct& p, GroupedParams params, cudaStream_t stream) {
  params.box_rows = std::min(p.sizes.segment_rows, Shape::kRows < 128 ? Shape::kRows : 64);
  using Number = std::conditional_t<kRounded<Form<T>>, unsigned char, T>;
  if (!make_map<Number, 2>(&params.x, data<Number>(p.x), {p.k, p.x.size(0)}, {p.x.stride(0)},
                           {Shape::kBoxColumns, params.box_rows})) {
    fail(kCodedExperts, "the copy engine cannot address the rows");
  }
  params.column_tiles = static_cast<int>(divide_up(p.columns, Shape::kWidth / p.halves * Shape::kCluster));
  params.steps = static_cast<int>(divide_up(p.across, Shape::kChunks));
  params.stage_bytes = Shape::stage_bytes(params.box_rows, bytes_of_patch<Form<T>>(p.group_log2));
  const int most = (Shape::kBlocks == 2 ? kSharedOfTwo : kSharedOfBlock) - 2048;  // also what residency is asked for
  const int beside = Shape::kResultBytes + Shape::kAlignment;
  params.stages = std::min(kMostGroupedStages, (most - beside) / params.stage_bytes);
  const int shared = params.stages * params.stage_bytes + beside;
  const int64_t tiles = p.order.most_segments * params.column_tiles;
  const int64_t clusters = std::min<int64_t>(tiles, resident_grouped<Shape, Gated, T, Form>(p.x.get_device_index(), most));
  if (clusters == 0) fail(kCodedExperts, "its kernel needs ", most, " bytes of shared memory a block, which this device has not");
  launch_dependent(grouped_linear_kernel<T, Shape, Gated, Form<T>>,
                   {dim3(clusters * Shape::kCluster), dim3(Shape::kThreads), stream, static_cast<size_t>(shared),
                    static_cast<unsigned>(Shape::kCluster)},
                   params);
}

template <typename Shape, typename T, template <typename> typename Form>
void launch_grouped(const CodedProduct& p, const GroupedParams& params, cudaStream_t stream) {
  p.halves == 2 ? launch_grouped<Shape, true, T, Form>(p, params, stream)
                : launch_grouped<Shape, false, T, Form>(p, params, stream);
}

// Each row times its expert's weight, and the activation: [pairs, columns].
template <typename T, template <typename> typename Form>
Tensor coded_product(const CodedProduct& p, cudaStream_t stream) {
  constexpr int kBoxes = kRounded<Form<T>> ? 1 : 2;
  using Narrow = PatchedShape<64, 32, 1, 2, 1, kBoxes>;
  using Wide = PatchedShape<128, 32, 2, 2, 1>;  // more warps decode, where that takes longer than reading
  using Many = std::conditional_t<kRounded<Form<T>>, PatchedShape<192, 128, 3, 1, 1, 1>, PatchedShape<128, 128, 2, 1>>;
  constexpr bool kFourBits = Form<T>::kBits == 4;
  constexpr auto kType = std::is_same_v<T, __half> ? ScalarType::Half : ScalarType::BFloat16;
  const Tensor out = torch::stable::new_empty(p.x, {p.sizes.pairs, p.columns}, kType);
  GroupedParams params{};
  params.patched = {data<unsigned char>(p.weight), static_cast<int>(p.across), static_cast<int>(p.weight.size(1)),
                    p.group_log2};
  params.x_scales = p.scales ? data<float>(*p.scales) : nullptr;
  params.segments = p.order.segments;
  params.segments.share = static_cast<int>(p.sizes.pairs / p.x.size(0));
  params.bias = p.bias ? data<T>(*p.bias) : nullptr;
  params.out = out.data_ptr();
  params.columns = static_cast<int>(p.columns);
  if (p.gate) params.gate = *p.gate;
  // Spreading and rounding start the next kernel only after the sorting has ended, so segments may be read early.
  params.early = p.order.places != nullptr || !p.gate;
  if (p.sizes.segment_rows > Narrow::kRows) {
    launch_grouped<Many, T, Form>(p, params, stream);
  } else if (!kFourBits || p.sizes.pairs <= kMostNarrowPairs) {
    launch_grouped<Narrow, T, Form>(p, params, stream);
  } else if constexpr (kFourBits) {
    launch_grouped<Wide, T, Form>(p, params, stream);
  }
  return out;
}

struct CodedCall {
  const Tensor &x, &gate_up, &down, &weights, &chosen;
  const std::optional<Tensor>&gate_up_bias, &down_bias;
  ExpertGate gate;
  int group_log2;
  int64_t size = gate_up.size(1) * 8;  // columns between the products
};

// The caller has checked the arguments, except the bytes of a row of patches.
template <typename T, template <typename> typename Form>
Tensor coded_experts(const CodedCall& c) {
  const int patch = bytes_of_patch<Form<T>>(c.group_log2);
  Arg(kCodedExperts, "gate_up", c.gate_up).size(2, divide_up(c.x.size(1), kPatchColumns) * patch, "the patches of x's columns");
  Arg(kCodedExperts, "down", c.down).size(2, divide_up(c.size, kPatchColumns) * patch, "the patches of gate's rows");
  if (c.x.size(0) == 0) return torch::stable::new_empty(c.x, {0, c.x.size(1)});
  const Sizes sizes{c.x.size(0), c.chosen.size(1), c.down.size(0), c.x.size(1), c.size, kMostCodedRows};
  const Guard guard(c.x.get_device_index());
  const cudaStream_t stream = current_stream(c.x);
  const Order order = order_of(c.chosen, sizes, stream);
  const auto first = [&](const Tensor& x, const Tensor* scales) {
    return coded_product<T, Form>({x, c.gate_up, c.gate_up_bias, order, sizes, c.group_log2, c.gate, scales}, stream);
  };
  const auto second = [&](const Tensor& x, const Tensor* scales) {
    const Tensor parts = coded_product<T, Form>(
        {x, c.down, c.down_bias, order, sizes, c.group_log2, std::nullopt, scales}, stream);
    return gather_sums(parts, c.weights, order, sizes, stream);
  };
  const auto both = [&] {
    if constexpr (kRounded<Form<T>>) {
      constexpr bool kFloats = Form<T>::kScalesPatches;
      const RoundedRows rows = rounded_rows(c.x, kFloats, stream, order.places, sizes.per_token);
      const RoundedRows inner = rounded_rows(first(rows.bytes, &rows.scales), kFloats, stream);
      return second(inner.bytes, &inner.scales);
    } else {
      return second(first(spread(c.x, order, sizes, stream), nullptr), nullptr);
    }
  };
  const Tensor out = both();
  check_launch(kCodedExperts);
  return out;
}

}  // namespace raylm::cuda
