#include "raylm/cuda/tile_linear.cuh"

#include <algorithm>
#include <array>

#include "products.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

// A kernel, by the shape of its tiles.
struct Variant {
  int rows, width, split, depth, box, stage_bytes, fixed_bytes, threads;  // fixed: of shared memory beside stages
  int (*resident)(int device);  // clusters that the device runs at a time, a block on each multiprocessor
  void (*kernel)(TileParams, GateAct);
};

template <typename N, typename Shape, bool Gated>
int resident(int device) {
  static DeviceNumber known;
  return known.of(device, [] {
    const auto* kernel = reinterpret_cast<const void*>(tile_linear_kernel<N, Shape, Gated>);
    return resident_clusters(kernel, Shape::kSplit, Shape::kThreads, kDynamicOfBlock);
  });
}

template <typename N, bool Gated, int Rows, int Width, int Split>
constexpr Variant variant() {
  using Shape = TileShape<Rows, Width, Split>;
  return {Rows, Width, Split, Shape::kDepth, tile_box<Shape, Gated>, Shape::kStageBytes, Shape::kFixedBytes, Shape::kThreads,
          resident<N, Shape, Gated>, tile_linear_kernel<N, Shape, Gated>};
}

// Up to 64 rows.
template <typename N>
constexpr std::array kFew{
    variant<N, false, 32, 48, 1>(),  variant<N, false, 32, 64, 1>(), variant<N, false, 32, 96, 1>(),
    variant<N, false, 32, 128, 1>(), variant<N, false, 32, 64, 2>(), variant<N, false, 32, 96, 2>(),
    variant<N, false, 64, 48, 1>(),  variant<N, false, 64, 64, 1>(), variant<N, false, 64, 96, 1>(),
    variant<N, false, 64, 128, 1>(), variant<N, false, 64, 64, 2>(), variant<N, false, 64, 96, 2>()};

template <typename N>
constexpr std::array kFewGated{
    variant<N, true, 32, 64, 1>(),  variant<N, true, 32, 96, 1>(), variant<N, true, 32, 112, 1>(),
    variant<N, true, 32, 128, 1>(), variant<N, true, 64, 64, 1>(), variant<N, true, 64, 96, 1>(),
    variant<N, true, 64, 112, 1>(), variant<N, true, 64, 128, 1>()};

// Of numbers of 16 bits torch's library is as fast.
template <typename T>
constexpr std::array kManyScaled{
    variant<Scaled<T>, false, 128, 96, 1>(), variant<Scaled<T>, false, 128, 64, 2>(),
    variant<Scaled<T>, false, 128, 96, 2>(), variant<Scaled<T>, false, 256, 96, 1>(),
    variant<Scaled<T>, false, 256, 64, 2>()};

template <typename T>
constexpr std::array kManyGated{
    variant<Plain<T>, true, 192, 224, 1>(), variant<Plain<T>, true, 256, 96, 1>(), variant<Plain<T>, true, 256, 112, 1>()};

template <typename T>
constexpr std::array kManyScaledGated{
    variant<Scaled<T>, true, 128, 96, 1>(), variant<Scaled<T>, true, 128, 112, 1>(), variant<Scaled<T>, true, 192, 224, 1>(),
    variant<Scaled<T>, true, 256, 96, 1>(), variant<Scaled<T>, true, 256, 112, 1>()};

// Products whose sums over k have one order, of any number of rows: k in one piece, 16 numbers at a time from the first on,
// whatever the tile's shape.
template <typename T>
constexpr std::array kInvariant{
    variant<Plain<T>, false, 32, 48, 1>(),  variant<Plain<T>, false, 32, 64, 1>(),
    variant<Plain<T>, false, 32, 96, 1>(),  variant<Plain<T>, false, 32, 128, 1>(),
    variant<Plain<T>, false, 64, 48, 1>(),  variant<Plain<T>, false, 64, 64, 1>(),
    variant<Plain<T>, false, 64, 96, 1>(),  variant<Plain<T>, false, 64, 128, 1>(),
    variant<Plain<T>, false, 256, 128, 1>()};

struct Size {
  int64_t rows, columns, depth;  // columns: of the result; depth: bytes of a row of x and of W
  bool scaled, gated, invariant;
};

struct Plan {
  const Variant* variant;  // null: none
  int tiles, row_tiles, clusters;
  double cost;
};

// Cycles of a block for its tiles, about, fitted to an H200: of the products of Llama-3.1-8B, whole and on two GPUs,
// Qwen3-0.6B and Qwen3-30B-A3B's attention with 16 to 512 rows, the variant of least cost took 0.5 % more than the fastest,
// and 10 % at most. A step of 128 bytes of k takes what is longest: multiplying, its bytes' way from the L2 cache, and all
// blocks' weights' way from memory.
double cycles(const Variant& v, const Size& size, int tiles, int row_tiles, int resident) {
  constexpr double kFromCache = 45, kFromMemory = 3400, kLeast = 300;  // bytes a cycle, of a block and of all; cycles
  constexpr double kMultiply = 1.19 / 32, kTile = 750, kWrite = 0.1, kMeet = 2400, kMeetWord = 0.05;
  const double area = std::max(v.rows, 64) * static_cast<double>(v.width);
  const double steps = divide_up(divide_up(size.depth, 128), v.split);
  double sum = v.split > 1 ? kMeet + area * kMeetWord : 0;
  for (int left = tiles; left > 0; left -= resident) {
    const double weights = v.width * 128.0 * v.split * std::min(left, resident) / row_tiles;
    const double fetch = (v.rows + v.width) * 128 / kFromCache;
    const double step = std::max({area * kMultiply, fetch, weights / kFromMemory, kLeast});
    sum += steps * step + kTile + area * kWrite / v.split;
  }
  return sum;
}

// Of torch's library, whose tiles of 8-bit numbers are 128 × 128 here; the activation is an operator then.
double library_cycles(const Size& size, int multiprocessors) {
  constexpr double kTile = 6000, kStep = 480, kActivation = 8000;
  const int64_t tiles = divide_up(size.rows, 128) * divide_up(size.columns * (size.gated ? 2 : 1), 128);
  const double steps = divide_up(size.depth, 128);
  return divide_up(tiles, multiprocessors) * (kTile + steps * kStep) + (size.gated ? kActivation : 0);
}

// Where the kernels were measured to be faster than torch's library, in a model (H200): up to 64 rows; with the activation
// and a large weight also where tiles of 192 or 256 rows are little less than full (but at 577 to 640 rows, by 6 %). More
// rows of 8-bit numbers are compared by cycles.
bool takes(const Variant& v, const Size& size) {
  if (size.invariant) {
    // Where a row does not end with a stage, stages of another depth end with another number of zeros.
    return v.rows <= 32 ? size.rows <= v.rows : v.rows <= 64 || size.depth % 256 == 0;
  }
  constexpr int64_t kLargeWeight = 32 << 20;  // bytes
  if (size.rows <= 64) return size.rows <= v.rows;
  return size.scaled || (4 * size.rows >= 3 * divide_up(size.rows, v.rows) * v.rows &&
                         2 * size.columns * size.depth >= kLargeWeight);
}

template <size_t N>
Plan plan_for(const std::array<Variant, N>& variants, const Size& size, int device) {
  constexpr double kFilled = 0.45;  // of the clusters, at least
  Plan best{};
  for (const Variant& v : variants) {
    if (!takes(v, size)) continue;
    const int resident = v.resident(device);
    const int row_tiles = static_cast<int>(divide_up(size.rows, v.rows));
    const int columns = v.width / (size.gated ? 2 : 1);
    const int64_t tiles = row_tiles * divide_up(size.columns, columns);
    if (resident == 0 || tiles > (1 << 30) || (!size.invariant && (tiles > (1 << 20) || tiles < kFilled * resident))) {
      continue;
    }
    const int64_t steps = divide_up(size.depth, v.depth);
    if (v.split > 1 && (tiles > resident || (v.split - 1) * divide_up(steps, v.split) >= steps)) continue;
    const double cost = cycles(v, size, static_cast<int>(tiles), row_tiles, resident);
    if (best.variant && best.cost <= cost) continue;
    best = {&v, static_cast<int>(tiles), row_tiles, static_cast<int>(std::min<int64_t>(tiles, resident)), cost};
  }
  return best;
}

// The rest of the parameters. False where the copy engine cannot address a tensor.
template <typename N>
bool fill(TileParams& params, const Plan& plan, const Size& size, const Product& p) {
  const Variant& v = *plan.variant;
  params.rows = static_cast<int>(size.rows), params.columns = static_cast<int>(size.columns);
  params.row_tiles = plan.row_tiles, params.tiles = plan.tiles;
  const int64_t even = divide_up(size.rows, plan.row_tiles);
  params.tile_rows = static_cast<int>(plan.row_tiles == 1 ? even : divide_up(even, 8) * 8);
  params.steps = static_cast<int>(divide_up(size.depth, v.depth)), params.slice_steps = divide_up(params.steps, v.split);
  const int steps = params.slice_steps * divide_up(plan.tiles, plan.clusters);
  params.stages = std::min({steps, kMostTileStages, (kDynamicOfBlock - v.fixed_bytes) / v.stage_bytes});
  params.early = p.frozen;
  using Stored = typename N::Stored;
  constexpr int64_t kWide = 128 / sizeof(Stored);
  const auto* x = data<Stored>(p.x);
  const auto* weight = data<Stored>(p.weight);
  return make_map<Stored, 2>(&params.x, x, {p.k, size.rows}, {p.x_stride}, {kWide, params.tile_rows}) &&
         make_map<Stored, 2>(&params.weight, weight, {p.k, p.n}, {p.weight.stride(0)}, {kWide, v.box},
                             CU_TENSOR_MAP_SWIZZLE_128B, kLines);
}

template <typename N>
Plan plan_of(const Size& size, int device) {
  using T = typename N::Result;
  if (size.invariant) {
    if constexpr (N::kScaled) return {};
    else return plan_for(kInvariant<T>, size, device);
  }
  if (size.rows <= 64) return size.gated ? plan_for(kFewGated<N>, size, device) : plan_for(kFew<N>, size, device);
  if constexpr (N::kScaled) {
    const Plan plan = size.gated ? plan_for(kManyScaledGated<T>, size, device) : plan_for(kManyScaled<T>, size, device);
    const double library = library_cycles(size, device_attribute(cudaDevAttrMultiProcessorCount, device));
    return plan.cost < library ? plan : Plan{};
  } else {
    return size.gated ? plan_for(kManyGated<T>, size, device) : Plan{};
  }
}

template <typename N>
std::optional<Tensor> run(const Product& p, const Size& size, GateAct act) {
  const Plan plan = plan_of<N>(size, p.x.get_device_index());
  TileParams params{};
  if (!plan.variant || !fill<N>(params, plan, size, p)) return std::nullopt;
  const Variant& v = *plan.variant;
  const Tensor out = new_rows(p.x, size.columns, p.result);
  params.bias = p.bias ? p.bias->data_ptr() : nullptr;
  params.out = out.data_ptr();
  if (p.scales) params.x_scales = data<float>(*p.x_scales), params.scales = data<float>(*p.scales);
  launch_dependent(v.kernel,
                   {dim3(plan.clusters * v.split), dim3(v.threads), current_stream(p.x),
                    static_cast<size_t>(v.fixed_bytes + params.stages * v.stage_bytes), static_cast<unsigned>(v.split)},
                   params, act);
  check_launch(size.gated ? "gated_linear" : p.scales ? "scaled_linear" : "linear");
  return out;
}

std::optional<Tensor> run(const Product& p, GateAct act, bool invariant) {
  constexpr int64_t kMost = 1 << 24;
  const bool gated = act != GateAct::kNone;
  const int64_t columns = gated ? p.n / 2 : p.n;
  const int64_t depth = p.k * (p.scales ? 1 : 2);
  const bool fits = columns >= 8 && columns % 8 == 0 && p.n <= kMost && depth >= 256 && depth % 16 == 0 && p.k <= kMost;
  const int64_t most_rows = invariant ? kMost : 1023;
  if (!kHopperKernels || p.rows < 1 || p.rows > most_rows || !fits) return std::nullopt;
  const Guard guard(p.x.get_device_index());
  const Size size{p.rows, columns, depth, p.scales != nullptr, gated, invariant};
  const bool half = p.result == ScalarType::Half;
  if (p.scales) return half ? run<Scaled<__half>>(p, size, act) : run<Scaled<__nv_bfloat16>>(p, size, act);
  return half ? run<Plain<__half>>(p, size, act) : run<Plain<__nv_bfloat16>>(p, size, act);
}

}  // namespace

std::optional<Tensor> tile_linear(const Product& product, bool invariant) {
  return run(product, GateAct::kNone, invariant);
}

std::optional<Tensor> tile_gated_linear(const Product& product, bool gelu_tanh) {
  return run(product, gelu_tanh ? GateAct::kGeluTanh : GateAct::kSilu, false);
}

}  // namespace raylm::cuda
