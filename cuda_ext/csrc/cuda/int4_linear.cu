#include "raylm/cuda/int4_linear.cuh"

#include <algorithm>

#include "products.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "int4_linear";
constexpr int64_t kMostRows = 1024;  // of x that the kernel was measured to be faster with (H100); more read W as numbers
constexpr int kSplits[] = {1, 2, 4, 8};

// A kernel, by its shape.
struct Variant {
  int rows, width, columns, box_columns, threads;
  int (*stage_bytes)(int group_shift);
  int (*shared_bytes)(int group_shift, int stages);
  int (*resident)(int device, int split);  // clusters that the device runs at a time
  void (*kernel)(Int4Params);
};

template <typename T, typename Shape, bool Narrow, int Split>
int resident(int device) {
  static DeviceNumber known;
  return known.of(device, [] {
    const auto* kernel = reinterpret_cast<const void*>(int4_linear_kernel<T, Shape, Narrow>);
    return resident_clusters(kernel, Split, Shape::kThreads + kWarp, kDynamicOfBlock);
  });
}

template <typename T, typename Shape, bool Narrow>
int resident_of(int device, int split) {
  switch (split) {
    case 1: return resident<T, Shape, Narrow, 1>(device);
    case 2: return resident<T, Shape, Narrow, 2>(device);
    case 4: return resident<T, Shape, Narrow, 4>(device);
    default: return resident<T, Shape, Narrow, 8>(device);
  }
}

template <typename T, bool Narrow, typename Shape>
constexpr Variant variant() {
  return {Shape::kRows, Shape::kWidth, Shape::kColumns, Shape::kBoxes * 64, Shape::kThreads + kWarp, Shape::stage_bytes, Shape::shared_bytes,
          resident_of<T, Shape, Narrow>, int4_linear_kernel<T, Shape, Narrow>};
}

// Narrow: of groups of fewer than 128 columns.
template <typename T, bool Narrow>
constexpr Variant kVariants[] = {
    variant<T, Narrow, Int4Shape<8, 32, 4, 16>>(),   variant<T, Narrow, Int4Shape<8, 64, 2, 16>>(),
    variant<T, Narrow, Int4Shape<16, 64, 2, 16>>(),  variant<T, Narrow, Int4Shape<16, 128, 1, 16>>(),
    variant<T, Narrow, Int4Shape<32, 64, 1, 8>>(),   variant<T, Narrow, Int4Shape<32, 128, 1, 8>>(),
    variant<T, Narrow, Int4WideShape<64>>(), variant<T, Narrow, Int4WideShape<128>>()};

struct Int4Product {
  const Tensor& x;       // [rows, k]
  const Tensor& weight;  // [n / 16, bytes of patches beside each other]
  const std::optional<Tensor>& bias;
  int group_shift;
  bool frozen;
  int64_t rows = x.size(0), k = x.size(1), n = weight.size(0) * kPatchRows, patches = divide_up(k, kPatchColumns);
};

struct Plan {
  const Variant* variant;  // null: none
  int split, tiles, row_tiles, clusters;
  double cost;
};

// Cycles of a block, about: a stage takes what is longest, its products or its bytes' ways.
double cycles(const Variant& v, const Int4Product& p, int64_t tiles, int split, int resident) {
  constexpr double kFromCache = 45, kFromMemory = 3400;  // bytes a cycle, of a block and of all
  constexpr double kMultiply = 1.0 / 32, kTile = 1500, kMeet = 2000;
  const double weights = v.width / kPatchRows * v.columns / kPatchColumns * patch_bytes(p.group_shift);
  const double bytes = weights + v.columns * 2.0 * v.rows;
  const double multiply = v.width * static_cast<double>(v.columns) * kMultiply * std::max(1, v.rows / 16);
  double sum = split > 1 ? kMeet : 0;
  for (int64_t left = tiles; left > 0; left -= resident) {
    const double all = weights * split * std::min<int64_t>(left, resident) / kFromMemory;
    sum += divide_up(divide_up(p.k, v.columns), split) * std::max({bytes / kFromCache, all, multiply}) + kTile;
  }
  return sum;
}

template <typename T, bool Narrow>
Plan plan_for(const Int4Product& p, int device) {
  Plan best{};
  const int most = p.rows <= 8 ? 8 : p.rows <= 16 ? 16 : p.rows <= 32 ? 32 : p.rows <= 64 ? 64 : 128;
  for (const Variant& v : kVariants<T, Narrow>) {
    if (v.rows != most) continue;
    const int64_t row_tiles = divide_up(p.rows, v.rows), tiles = row_tiles * divide_up(p.n, v.width);
    for (const int split : kSplits) {
      const int resident = v.resident(device, split);
      const int64_t steps = divide_up(p.k, v.columns);
      const bool some = (split - 1) * divide_up(steps, split) < steps;  // for each block
      if (!some || resident == 0 || (split > 1 && tiles > resident)) continue;
      const double cost = cycles(v, p, tiles, split, resident);
      if (best.variant && best.cost <= cost) continue;
      best = {&v, split, static_cast<int>(tiles), static_cast<int>(row_tiles),
              static_cast<int>(std::min<int64_t>(tiles, resident)), cost};
    }
  }
  return best;
}

template <typename T>
bool run_kernel(const Int4Product& p, const Tensor& out) {
  const int device = p.x.get_device_index();
  const Plan plan = p.group_shift < 2 ? plan_for<T, true>(p, device) : plan_for<T, false>(p, device);
  Int4Params params{};
  if (!plan.variant) return false;
  const Variant& v = *plan.variant;
  params.box_rows = v.rows == 8 ? static_cast<int>(std::min<int64_t>(p.rows, 8)) : v.rows;
  const int64_t boxes = v.box_columns / 64;
  if (!make_map<T, 3>(&params.x, data<T>(p.x), {64, p.rows, p.k / 64}, {p.x.stride(0), 64}, {64, params.box_rows, boxes})) {
    return false;
  }
  params.weight = data<unsigned char>(p.weight);
  params.bias = p.bias ? p.bias->data_ptr() : nullptr;
  params.out = out.data_ptr();
  params.rows = static_cast<int>(p.rows), params.n = static_cast<int>(p.n);
  params.group_shift = p.group_shift;
  params.row_tiles = plan.row_tiles, params.tiles = plan.tiles, params.split = plan.split;
  params.patches = static_cast<int>(p.patches), params.steps = static_cast<int>(divide_up(p.k, v.columns));
  params.slice = divide_up(params.steps, plan.split);
  const int room = (kDynamicOfBlock - v.shared_bytes(p.group_shift, 0)) / v.stage_bytes(p.group_shift);
  params.stages = std::min({room, kMostInt4Stages, params.slice * divide_up(plan.tiles, plan.clusters)});
  params.early = p.frozen;
  launch_dependent(v.kernel,
                   {dim3(plan.clusters * plan.split), dim3(v.threads), current_stream(p.x),
                    static_cast<size_t>(v.shared_bytes(p.group_shift, params.stages)),
                    static_cast<unsigned>(plan.split)},
                   params);
  return true;
}

// W as numbers, and torch's product with them.
template <typename T>
Tensor by_numbers(const Int4Product& p) {
  const Tensor numbers = torch::stable::new_empty(p.x, {p.n, p.k});
  const Int4DecodeParams params{data<unsigned char>(p.weight), numbers.data_ptr(), static_cast<int>(p.n),
                                static_cast<int>(p.k), static_cast<int>(p.patches), p.group_shift};
  constexpr int kThreads = 256;
  const int64_t warps = p.n / kPatchRows * p.patches * 8;
  launch_dependent(int4_decode_kernel<T>, dim3(divide_up(warps, kThreads / kWarp)), dim3(kThreads),
                   current_stream(p.x), params);
  return linear(p.x, numbers, p.bias, false);
}

Tensor int4_linear(Tensor x, Tensor weight, int64_t group, std::optional<Tensor> bias, bool frozen) {
  constexpr int64_t kMost = 1 << 24;
  const int shift = shift_of(kOp, group);
  Arg(kOp, "x", x).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).last_contiguous();
  const int64_t k = x.size(1), bytes = divide_up(k, kPatchColumns) * patch_bytes(shift);
  Arg(kOp, "weight", weight).dtype({ScalarType::Byte}).dim(2).on_device_of(x).contiguous();
  Arg(kOp, "weight", weight).size(1, bytes, "the patches of x's columns");
  const Int4Product product{x, weight, bias, shift, frozen};
  if (bias) Arg(kOp, "bias", *bias).dtype({x.scalar_type()}).dim(1).size(0, product.n, "the rows of weight");
  if (bias) Arg(kOp, "bias", *bias).on_device_of(x).contiguous();
  if (k % 64 != 0 || k == 0) fail(kOp, "x has ", k, " columns, must have a multiple of 64");
  if (product.n > kMost || k > kMost || product.rows > kMost) fail(kOp, "x or weight has more than ", kMost, " rows or columns");
  if (!is_aligned(x.data_ptr()) || x.stride(0) % 8 || !is_aligned(weight.data_ptr())) {
    fail(kOp, "rows of x or weight are not 16-byte aligned");
  }
  if (!kHopperKernels || compute_major(x.get_device_index()) != 9) fail(kOp, "has kernels for Hopper GPUs alone");
  const Tensor out = torch::stable::new_empty(x, {product.rows, product.n});
  if (product.rows == 0) return out;
  const Guard guard(x.get_device_index());
  const auto run = [&](auto type) {
    using T = decltype(type);
    return product.rows <= kMostRows && run_kernel<T>(product, out) ? out : by_numbers<T>(product);
  };
  const Tensor result = x.scalar_type() == ScalarType::Half ? run(__half{}) : run(__nv_bfloat16{});
  check_launch(kOp);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("int4_linear", TORCH_BOX(&int4_linear)); }

}  // namespace raylm::cuda
