#include "experts.h"
#include "patches.h"
#include "raylm/cuda/grouped_linear.cuh"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "patched_experts";
constexpr int kMostRows = 128;   // of a segment
constexpr int kMostNarrow = 32;  // (token, expert) pairs up to which narrow tiles are faster (H100)

struct PatchedProduct {
  const Tensor& x;       // [rows, k], in the order of the experts or one a token
  const Tensor& weight;  // [experts, n / 16, bytes of patches beside each other]
  const std::optional<Tensor>& bias;
  const Order& order;
  const Sizes& sizes;
  int group_log2;
  ExpertAct act;
  float limit;
  int64_t halves = act == ExpertAct::kNone ? 1 : 2;
  int64_t k = x.size(1), columns = weight.size(1) * 16 / halves, across = divide_up(k, kPatchColumns);
};

// Clusters that the device runs at a time.
template <typename Shape, bool Gated, typename T, template <typename> typename Form>
int resident(int device, int shared) {
  static DeviceNumber known;
  return known.of(device, [&] {
    const auto* kernel = reinterpret_cast<const void*>(grouped_linear_kernel<T, Shape, Gated, Form<T>>);
    return resident_clusters(kernel, Shape::kCluster, Shape::kThreads, shared);
  });
}

template <typename Shape, bool Gated, typename T, template <typename> typename Form>
void launch(const PatchedProduct& p, GroupedParams params, cudaStream_t stream) {
  params.box_rows = std::min(p.sizes.segment_rows, Shape::kRows < 128 ? Shape::kRows : 64);
  if (!make_map<T, 2>(&params.x, data<T>(p.x), {p.k, p.x.size(0)}, {p.x.stride(0)}, {64, params.box_rows})) {
    fail(kOp, "the copy engine cannot address the rows");
  }
  params.column_tiles = static_cast<int>(divide_up(p.columns, Shape::kWidth / p.halves * Shape::kCluster));
  params.steps = static_cast<int>(divide_up(p.across, Shape::kChunks));
  params.stage_bytes = Shape::stage_bytes(params.box_rows, bytes_of_patch(Form<T>::kBits, p.group_log2));
  const int most = (Shape::kBlocks == 2 ? kSharedOfTwo : kSharedOfBlock) - 2048;  // also what residency is asked for
  const int beside = Shape::kResultBytes + Shape::kAlignment;
  params.stages = std::min(kMostGroupedStages, (most - beside) / params.stage_bytes);
  const int shared = params.stages * params.stage_bytes + beside;
  const int64_t tiles = p.order.most_segments * params.column_tiles;
  const int64_t clusters = std::min<int64_t>(tiles, resident<Shape, Gated, T, Form>(p.x.get_device_index(), most));
  if (clusters == 0) fail(kOp, "its kernel needs ", most, " bytes of shared memory a block, which this device has not");
  launch_dependent(grouped_linear_kernel<T, Shape, Gated, Form<T>>,
                   {dim3(clusters * Shape::kCluster), dim3(Shape::kThreads), stream, static_cast<size_t>(shared),
                    static_cast<unsigned>(Shape::kCluster)},
                   params);
}

template <typename Shape, typename T, template <typename> typename Form>
void launch(const PatchedProduct& p, const GroupedParams& params, cudaStream_t stream) {
  p.halves == 2 ? launch<Shape, true, T, Form>(p, params, stream) : launch<Shape, false, T, Form>(p, params, stream);
}

// Each row times its expert's weight, and the activation: [pairs, columns].
template <typename T, template <typename> typename Form>
Tensor product(const PatchedProduct& p, cudaStream_t stream) {
  using Narrow = PatchedShape<64, 32, 1, 2>;
  using Wide = PatchedShape<128, 32, 2, 2, 1>;  // more warps decode, where that takes longer than reading
  using Many = PatchedShape<128, 128, 2, 1>;
  constexpr bool kFourBits = Form<T>::kBits == 4;
  const Tensor out = torch::stable::new_empty(p.x, {p.sizes.pairs, p.columns});
  GroupedParams params{};
  params.patched = {data<unsigned char>(p.weight), static_cast<int>(p.across), static_cast<int>(p.weight.size(1)),
                    p.group_log2};
  params.segments = p.order.segments;
  params.segments.share = static_cast<int>(p.sizes.pairs / p.x.size(0));
  params.bias = p.bias ? data<T>(*p.bias) : nullptr;
  params.out = out.data_ptr();
  params.columns = static_cast<int>(p.columns);
  params.act = p.act;
  params.limit = p.limit;
  params.early = p.order.places != nullptr || p.act == ExpertAct::kNone;  // as experts has it
  if (p.sizes.segment_rows > Narrow::kRows) {
    launch<Many, T, Form>(p, params, stream);
  } else if (!kFourBits || p.sizes.pairs <= kMostNarrow) {
    launch<Narrow, T, Form>(p, params, stream);
  } else if constexpr (kFourBits) {
    launch<Wide, T, Form>(p, params, stream);
  }
  return out;
}

struct Call {
  const Tensor &x, &gate_up, &down, &weights, &chosen;
  const std::optional<Tensor>&gate_up_bias, &down_bias;
  ExpertAct act;
  float limit;
  int group_log2;
  int64_t size = gate_up.size(1) * 8;  // columns between the products
};

template <typename T, template <typename> typename Form>
Tensor run(const Call& c) {
  const int patch = bytes_of_patch(Form<T>::kBits, c.group_log2);
  Arg(kOp, "gate_up", c.gate_up).size(2, divide_up(c.x.size(1), kPatchColumns) * patch, "the patches of x's columns");
  Arg(kOp, "down", c.down).size(2, divide_up(c.size, kPatchColumns) * patch, "the patches of gate's rows");
  if (c.x.size(0) == 0) return torch::stable::new_empty(c.x, {0, c.x.size(1)});
  const Sizes sizes{c.x.size(0), c.chosen.size(1), c.down.size(0), c.x.size(1), c.size, kMostRows};
  const Guard guard(c.x.get_device_index());
  const cudaStream_t stream = current_stream(c.x);
  const Order order = order_of(c.chosen, sizes, stream);
  const Tensor rows = spread(c.x, order, sizes, stream);
  const Tensor inner =
      product<T, Form>({rows, c.gate_up, c.gate_up_bias, order, sizes, c.group_log2, c.act, c.limit}, stream);
  const Tensor parts =
      product<T, Form>({inner, c.down, c.down_bias, order, sizes, c.group_log2, ExpertAct::kNone, 0}, stream);
  const Tensor out = gather_sums(parts, c.weights, order, sizes, stream);
  check_launch(kOp);
  return out;
}

void check(const Call& c) {
  Arg(kOp, "x", c.x).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).last_contiguous();
  Arg(kOp, "gate_up", c.gate_up).dtype({ScalarType::Byte}).dim(3).on_device_of(c.x).contiguous();
  Arg(kOp, "down", c.down).dtype({ScalarType::Byte}).dim(3).on_device_of(c.x).contiguous();
  Arg(kOp, "gate_up", c.gate_up).size(0, c.down.size(0), "the experts of down");
  if (c.x.size(1) != c.down.size(1) * 16) fail(kOp, "x has ", c.x.size(1), " columns, must have the rows of down");
  if (c.gate_up.size(1) % 2) fail(kOp, "gate_up has ", c.gate_up.size(1), " rows of patches, must have as many of gate as of up");
  const auto bias = [&](const char* name, const std::optional<Tensor>& given, int64_t rows) {
    if (!given) return;
    Arg(kOp, name, *given).dtype({c.x.scalar_type()}).dim(2).size(0, c.down.size(0), "the experts").contiguous();
    Arg(kOp, name, *given).size(1, rows, "the rows of an expert's weight").on_device_of(c.x);
  };
  bias("gate_up_bias", c.gate_up_bias, 2 * c.size);
  bias("down_bias", c.down_bias, c.x.size(1));
  check_pairs(kOp, c.x, c.weights, c.chosen);
  if (!is_aligned(c.x.data_ptr()) || c.x.stride(0) % 8 || !is_aligned(c.gate_up.data_ptr()) || !is_aligned(c.down.data_ptr())) {
    fail(kOp, "rows of x or weights are not 16-byte aligned");
  }
  if (c.down.size(0) > kMostExperts) fail(kOp, "down has ", c.down.size(0), " experts, must have at most ", kMostExperts);
  if (!kHopperKernels || compute_major(c.x.get_device_index()) != 9) fail(kOp, "has kernels for Hopper GPUs alone");
}

Tensor patched_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor chosen,
                       std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t activation,
                       double limit, int64_t numbers, int64_t group) {
  if (activation < 0 || activation > 2) fail(kOp, "activation is ", activation, ", must be from 0 to 2");
  const Numbers kind = numbers_of(kOp, numbers, x);
  if (kind > Numbers::kAffine8) fail(kOp, "numbers is ", numbers, ", must be from 0 to 5: it has no kernels for others");
  const Call call{x, gate_up, down, weights, chosen, gate_up_bias, down_bias, static_cast<ExpertAct>(activation),
                  static_cast<float>(limit), group_log2_of(kOp, kind, group)};
  check(call);
  const bool half = x.scalar_type() == ScalarType::Half;
  switch (kind) {
    case Numbers::kInt4: return half ? run<__half, Int4Groups>(call) : run<__nv_bfloat16, Int4Groups>(call);
    case Numbers::kInt8: return half ? run<__half, Int8Codes>(call) : run<__nv_bfloat16, Int8Codes>(call);
    case Numbers::kAffine4: return run<__nv_bfloat16, Affine4Codes>(call);
    case Numbers::kAffine8: return run<__nv_bfloat16, Affine8Codes>(call);
    case Numbers::kMxfp4: return run<__nv_bfloat16, Mxfp4Codes>(call);
    default: return run<__nv_bfloat16, Fp8Codes>(call);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("patched_experts", TORCH_BOX(&patched_experts)); }

}  // namespace raylm::cuda
