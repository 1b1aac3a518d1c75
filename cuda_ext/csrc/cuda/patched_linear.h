// Products with weights of codes in patches: the kernels of a form, and which of them takes a call. Each form's kernels are
// compiled in a file of their own.
#pragma once

#include <algorithm>

#include "products.h"
#include "raylm/cuda/patched_decode.cuh"
#include "raylm/cuda/patched_linear.cuh"
#include "rounded_rows.h"
#include "tensor_map.h"

namespace raylm::cuda {

constexpr int64_t kMostPatchedRows = 1024;  // of x that the kernel was measured to be faster with (H100); more read W as numbers

struct PatchedProduct {
  const Tensor& x;       // [rows, k]
  const Tensor& weight;  // [n / 16, bytes of patches beside each other]
  const std::optional<Tensor>& bias;
  GateAct act;
  int group_log2;
  bool frozen;
  int64_t rows = x.size(0), k = x.size(1), n = weight.size(0) * kPatchRows, across = divide_up(k, kPatchColumns);
  int64_t columns = act == GateAct::kNone ? n : n / 2;  // of the result
};

// x W^T (+ bias), and its gated activation if there is one, of arguments that have been checked, for a form of x's type.
template <typename T, typename Form>
Tensor patched_product(const PatchedProduct& p);
// The same of integers of 8 bits without zero points, or of floats of 8 bits, by rows of x that are rounded to such numbers
// where there are many.
template <typename T>
Tensor by_integers(const PatchedProduct& p);
Tensor by_floats(const PatchedProduct& p);

// The form whose patches may have groups of any size, for kernels to which it makes no difference.
template <typename Form>
struct AnyGroups {
  using Type = Form;
};
template <typename T>
struct AnyGroups<Int4LongGroups<T>> {
  using Type = Int4Groups<T>;
};

// A kernel, by its shape.
struct PatchedVariant {
  bool wide;
  double rounded_cycles;  // of a number of W and a row of x that is rounded; 0: it is not
  int parts, rows, width, columns, boxes, threads;
  int (*stage_bytes)(int patch);
  int (*shared_bytes)(int patch, int stages, int split);
  int (*resident)(int device, int split);  // clusters that the device runs at a time
  void (*kernel)(PatchedParams);
};

template <typename T, typename Shape, typename Form>
int resident_patched(int device, int split) {
  static DeviceNumber known[kMostSplit];
  return known[split - 1].of(device, [split] {
    const auto* kernel = reinterpret_cast<const void*>(patched_linear_kernel<T, Shape, Form>);
    return resident_clusters(kernel, split, Shape::kThreads + Shape::kFetching, kDynamicOfBlock);
  });
}

// Integers' is that of the chip, floats' was measured.
template <typename Form>
constexpr double rounded_cycles_of() {
  if constexpr (kRounded<Form>) return Form::kScalesPatches ? 0.0005 : 0.00024;
  return 0;
}

template <typename T, typename Form, typename Shape>
constexpr PatchedVariant patched_variant() {
  return {Shape::kWide, rounded_cycles_of<Form>(), Shape::kParts, Shape::kRows, Shape::kWidth, Shape::kColumns, Shape::kBoxes,
          Shape::kThreads + Shape::kFetching, Shape::stage_bytes, Shape::shared_bytes,
          resident_patched<T, Shape, Form>, patched_linear_kernel<T, Shape, Form>};
}

// Where stages are large, those of codes of 8 bits have as many bytes, and so half the columns.
template <typename T, typename Form, bool Short = Form::kBits == 8>
constexpr PatchedVariant kPatchedVariants[] = {
    patched_variant<T, Form, PatchedFewShape<8, 32, Short ? 8 : 16, Short ? 8 : 16>>(),
    patched_variant<T, Form, PatchedFewShape<8, 64, Short ? 4 : 8, Short ? 8 : 16>>(),
    patched_variant<T, Form, PatchedFewShape<16, 64, Short ? 4 : 8, Short ? 8 : 16>>(),
    patched_variant<T, Form, PatchedFewShape<16, 128, 4, 16>>(),
    patched_variant<T, Form, PatchedWideShape<32, 64, 4, 16>>(),
    patched_variant<T, Form, PatchedWideShape<32, 256, Short ? 1 : 2, 16>>(),
    patched_variant<T, Form, PatchedWideShape<64, 64, 4, 16>>(),
    patched_variant<T, Form, PatchedWideShape<64, 256, Short ? 1 : 2, 16>>(),
    patched_variant<T, Form, PatchedWideShape<128, 128, 2, 8>>(),
    patched_variant<T, Form, PatchedWideShape<256, 128, 2, 8>>()};

template <typename T>
constexpr PatchedVariant kPatchedVariants<T, Int8Rows<T>, true>[] = {
    patched_variant<T, Int8Rows<T>, PatchedWideShape<64, 128, 2, 8, 1>>(),
    patched_variant<T, Int8Rows<T>, PatchedWideShape<128, 128, 2, 8, 1>>(),
    patched_variant<T, Int8Rows<T>, PatchedWideShape<256, 128, 2, 8, 1>>()};

// Partial sums take registers beside the totals, so a tile has at most 128 rows of x.
template <typename T>
constexpr PatchedVariant kPatchedVariants<T, Fp8Rows<T>, true>[] = {
    patched_variant<T, Fp8Rows<T>, PatchedWideShape<128, 128, 2, 8, 1>>(),
    patched_variant<T, Fp8Rows<T>, PatchedWideShape<128, 192, 2, 12, 1>>()};

struct PatchedPlan {
  const PatchedVariant* variant;  // null: none
  int split, tiles, row_tiles, clusters;
  double cost;
};

// What a variant takes, in cycles: a number of W, a tile besides, and a cluster whose sums meet. Measured on an H100, but for
// rows that are rounded, whose last two are guesses.
struct PatchedCosts {
  double number, tile, cluster;
  explicit PatchedCosts(const PatchedVariant& v) {
    if (v.rounded_cycles > 0) {
      number = v.rounded_cycles * v.rows, tile = 1500, cluster = 5000;
    } else if (v.wide) {
      number = 0.028 + 0.00048 * v.rows, tile = 1250 + 250 * v.parts, cluster = v.parts > 1 ? 2000 : 5000;
    } else {
      number = std::max(1, v.rows / 16) / 37.0, tile = 1500, cluster = 2000;
    }
  }
};

// Cycles of a block, about: a stage takes what is longest, its products or its bytes' ways.
inline double cycles_of(const PatchedVariant& v, const PatchedProduct& p, int patch, int64_t tiles, int split,
                        int resident) {
  constexpr double kFromCache = 45, kFromMemory = 3400, kMet = 32;  // bytes a cycle: of a block, of all, of a block
  const PatchedCosts costs(v);
  const double weights = v.width / kPatchRows * v.columns / kPatchColumns * patch;
  const double bytes = weights + v.columns * (v.rounded_cycles > 0 ? 1.0 : 2.0) * v.rows;
  const double multiply = v.width * static_cast<double>(v.columns) * costs.number;
  double sum = split > 1 ? costs.cluster + v.rows * v.width * 4 / kMet : 0;
  for (int64_t left = tiles; left > 0; left -= resident) {
    const double all = weights * split * std::min<int64_t>(left, resident) / kFromMemory;
    sum += divide_up(divide_up(p.k, v.columns), split) * std::max({bytes / kFromCache, all, multiply}) + costs.tile;
  }
  return sum;
}

inline int room_for_stages(const PatchedVariant& v, int patch, int split) {
  return (kDynamicOfBlock - v.shared_bytes(patch, 0, split)) / v.stage_bytes(patch);
}

// Whether the variant's tiles are for so many rows.
inline bool suits(const PatchedVariant& v, int64_t rows) {
  if (rows > 128) return v.rows >= 128;
  return v.rows >= rows && (v.rows < 2 * rows || v.rows == (v.rounded_cycles > 0 ? 64 : 8));
}

template <typename T, typename Form>
PatchedPlan patched_plan(const PatchedProduct& p, int patch, int device) {
  PatchedPlan best{};
  for (const PatchedVariant& v : kPatchedVariants<T, Form>) {
    if (!suits(v, p.rows)) continue;
    const int64_t row_tiles = divide_up(p.rows, v.rows), tiles = row_tiles * divide_up(p.n, v.width);
    for (int split = 1; split <= kMostSplit; ++split) {
      const int resident = v.resident(device, split);
      const int64_t steps = divide_up(p.k, v.columns);
      const bool some = (split - 1) * divide_up(steps, split) < steps;  // for each block
      const bool tried = v.wide || (split & (split - 1)) == 0;  // others gained nothing for few rows
      const bool overlaps = room_for_stages(v, patch, split) > 1;  // copies and products
      if (!some || !tried || !overlaps || resident == 0 || (split > 1 && tiles > resident)) continue;
      const double cost = cycles_of(v, p, patch, tiles, split, resident);
      if (best.variant && best.cost <= cost) continue;
      best = {&v, split, static_cast<int>(tiles), static_cast<int>(row_tiles),
              static_cast<int>(std::min<int64_t>(tiles, resident)), cost};
    }
  }
  return best;
}

// Of a box of x: what is outside of the tensor takes the copy engine time. wgmma wants rows by eights.
inline int box_rows_of(const PatchedVariant& v, int64_t rows) {
  if (v.wide) return static_cast<int>(std::min<int64_t>(v.rows, divide_up(rows, 8) * 8));
  return v.rows == 8 ? static_cast<int>(std::min<int64_t>(rows, 8)) : v.rows;
}

// False where the copy engine cannot address x.
template <typename T>
bool map_x(PatchedParams& params, const PatchedProduct& p, const PatchedVariant& v, const RoundedRows* rounded) {
  if (!rounded) {
    return make_map<T, 3>(&params.x, data<T>(p.x), {64, p.rows, p.k / 64}, {p.x.stride(0), 64},
                          {64, params.box_rows, v.boxes});
  }
  params.x_scales = data<float>(rounded->scales);
  const int64_t size = p.across * kPatchColumns;
  return make_map<unsigned char, 3>(&params.x, data<unsigned char>(rounded->bytes), {128, p.rows, p.across}, {size, 128},
                                    {128, params.box_rows, v.boxes});
}

// `rounded` holds x for forms that are kRounded, and is null for all others.
template <typename T, typename Form>
bool run_patched(const PatchedProduct& p, const Tensor& out, const RoundedRows* rounded = nullptr) {
  const int patch = bytes_of_patch<Form>(p.group_log2);
  const PatchedPlan plan = patched_plan<T, Form>(p, patch, p.x.get_device_index());
  PatchedParams params{};
  if (!plan.variant) return false;
  const PatchedVariant& v = *plan.variant;
  params.box_rows = box_rows_of(v, p.rows);
  if (!map_x<T>(params, p, v, rounded)) return false;
  params.weight = data<unsigned char>(p.weight);
  params.bias = p.bias ? p.bias->data_ptr() : nullptr;
  params.out = out.data_ptr();
  params.rows = static_cast<int>(p.rows), params.n = static_cast<int>(p.n);
  params.columns = static_cast<int>(p.columns), params.act = p.act;
  params.group_log2 = p.group_log2;
  params.row_tiles = plan.row_tiles, params.tiles = plan.tiles, params.split = plan.split;
  params.across = static_cast<int>(p.across), params.steps = static_cast<int>(divide_up(p.k, v.columns));
  params.slice = divide_up(params.steps, plan.split);
  const int steps = params.slice * divide_up(plan.tiles, plan.clusters);
  params.stages = std::min({room_for_stages(v, patch, plan.split), kMostPatchedStages, steps});
  params.early = p.frozen;
  const size_t shared = v.shared_bytes(patch, params.stages, plan.split);
  launch_dependent(v.kernel,
                   {dim3(plan.clusters * plan.split), dim3(v.threads), current_stream(p.x), shared,
                    static_cast<unsigned>(plan.split)},
                   params);
  return true;
}

// W as numbers, torch's product with them, and then the activation.
template <typename T, typename Form>
Tensor by_numbers(const PatchedProduct& p) {
  const Tensor numbers = torch::stable::new_empty(p.x, {p.n, p.k});
  const PatchedDecodeParams params{data<unsigned char>(p.weight), numbers.data_ptr(), static_cast<int>(p.n),
                                   static_cast<int>(p.k), static_cast<int>(p.across), p.group_log2};
  launch_dependent(patched_decode_kernel<T, Form>, dim3(divide_up(p.n / kPatchRows * p.across, kDecodeWarps)),
                   dim3(kDecodeWarps * kWarp), current_stream(p.x), params);
  const Tensor product = linear(p.x, numbers, p.bias, false);
  return p.act == GateAct::kNone ? product : p.act == GateAct::kSilu ? silu_mul(product) : gelu_tanh_mul(product);
}

template <typename T, typename Form>
Tensor patched_product(const PatchedProduct& p) {
  if (p.rows <= kMostPatchedRows) {
    const Tensor out = torch::stable::new_empty(p.x, {p.rows, p.columns});
    if (p.rows == 0 || run_patched<T, Form>(p, out)) return out;
  }
  return by_numbers<T, typename AnyGroups<Form>::Type>(p);
}

}  // namespace raylm::cuda
