#include "raylm/cuda/tile_linear.cuh"

#include <algorithm>
#include <array>

#include "products.h"
#include "tensor_map.h"

namespace raylm::cuda {
namespace {

// A kernel, by the shape of its tiles.
struct Variant {
  int rows, width, split, depth, stage_bytes, threads;
  int (*shared_bytes)(int stages);
  int (*resident)(int device);  // clusters that the device runs at a time, a block on each multiprocessor
  void (*kernel)(TileParams, TileAct);
};

template <typename T, typename Shape, bool Gated>
int resident(int device) {
  static DeviceNumber known;
  return known.of(device, [] {
    const auto* kernel = reinterpret_cast<const void*>(tile_linear_kernel<T, Shape, Gated>);
    return resident_clusters(kernel, Shape::kSplit, Shape::kThreads, kDynamicOfBlock);
  });
}

template <typename T, bool Gated, int Rows, int Width, int Split>
constexpr Variant variant() {
  using Shape = TileShape<Rows, Width, Split>;
  return {Rows, Width, Split, Shape::kDepth, Shape::kStageBytes, Shape::kThreads, Shape::shared_bytes,
          resident<T, Shape, Gated>, tile_linear_kernel<T, Shape, Gated>};
}

template <typename T>
constexpr std::array kPlain{
    variant<T, false, 32, 48, 1>(),  variant<T, false, 32, 64, 1>(), variant<T, false, 32, 96, 1>(),
    variant<T, false, 32, 128, 1>(), variant<T, false, 32, 64, 2>(), variant<T, false, 32, 96, 2>(),
    variant<T, false, 64, 48, 1>(),  variant<T, false, 64, 64, 1>(), variant<T, false, 64, 96, 1>(),
    variant<T, false, 64, 128, 1>(), variant<T, false, 64, 64, 2>(), variant<T, false, 64, 96, 2>()};

template <typename T>
constexpr std::array kGated{
    variant<T, true, 32, 64, 1>(),   variant<T, true, 32, 96, 1>(),   variant<T, true, 32, 112, 1>(),
    variant<T, true, 32, 128, 1>(),  variant<T, true, 64, 64, 1>(),   variant<T, true, 64, 96, 1>(),
    variant<T, true, 64, 112, 1>(),  variant<T, true, 64, 128, 1>(),  variant<T, true, 256, 96, 1>(),
    variant<T, true, 256, 112, 1>(), variant<T, true, 256, 128, 1>()};

struct Size {
  int64_t rows, columns, k;  // columns: of the result
  bool gated;
};

struct Plan {
  const Variant* variant;  // null: none
  int tiles, row_tiles, clusters;
  double cost;
};

// Cycles of a block for its tiles, about, fitted to an H200: of the products of Llama-3.1-8B and Qwen3-0.6B with 12 to 64
// rows, the variant of least cost was the fastest, or at most 2.4 % slower. A step of 64 of k takes what is longest:
// multiplying, its bytes' way from the L2 cache, and all blocks' weights' way from memory.
double cycles(const Variant& v, const Size& size, int tiles, int resident) {
  constexpr double kFromCache = 45, kFromMemory = 3400, kLeast = 300;  // bytes a cycle, of a block and of all; cycles
  constexpr double kMultiply = 1.19 / 32, kTile = 750, kWrite = 0.1, kMeet = 1500, kMeetWord = 0.2;
  const double area = std::max(v.rows, 64) * static_cast<double>(v.width);
  const double steps = divide_up(divide_up(size.k, 64), v.split);
  double sum = v.split > 1 ? kMeet + area * kMeetWord : 0;
  for (int left = tiles; left > 0; left -= resident) {
    const double weights = v.width * 128.0 * v.split * std::min(left, resident);
    const double fetch = (v.rows + v.width) * 128 / kFromCache;
    const double step = std::max({area * kMultiply, fetch, weights / kFromMemory, kLeast});
    sum += steps * step + kTile + area * kWrite;
  }
  return sum;
}

// Where the kernels were measured to be faster than torch's library, in a model (H200): up to 64 rows; with
// the activation and a large weight also where tiles of 256 rows are little less than full.
bool takes(const Variant& v, const Size& size) {
  constexpr int64_t kLargeWeight = 32 << 20;  // bytes
  if (size.rows <= 64) return size.rows <= v.rows && v.rows <= 64;
  return size.gated && v.rows == 256 && 4 * size.rows >= 3 * divide_up(size.rows, 256) * 256 &&
         4 * size.columns * size.k >= kLargeWeight;
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
    if (resident == 0 || tiles > (1 << 20) || tiles < kFilled * resident) continue;
    const int64_t steps = divide_up(size.k, v.depth);
    if (v.split > 1 && (tiles > resident || (v.split - 1) * divide_up(steps, v.split) >= steps)) continue;
    const double cost = cycles(v, size, static_cast<int>(tiles), resident);
    if (best.variant && best.cost <= cost) continue;
    best = {&v, static_cast<int>(tiles), row_tiles, static_cast<int>(std::min<int64_t>(tiles, resident)), cost};
  }
  return best;
}

// The rest of the parameters. False where the copy engine cannot address a tensor.
template <typename T>
bool fill(TileParams& params, const Plan& plan, const Size& size, const Product& p) {
  const Variant& v = *plan.variant;
  const int64_t box = size.gated ? v.width / 2 : v.width;
  params.rows = static_cast<int>(size.rows), params.columns = static_cast<int>(size.columns);
  params.row_tiles = plan.row_tiles, params.tiles = plan.tiles;
  const int64_t even = divide_up(size.rows, plan.row_tiles);
  params.tile_rows = static_cast<int>(plan.row_tiles == 1 ? even : divide_up(even, 8) * 8);
  params.steps = static_cast<int>(divide_up(size.k, v.depth)), params.slice_steps = divide_up(params.steps, v.split);
  const int steps = params.slice_steps * divide_up(plan.tiles, plan.clusters);
  params.stages = std::min({steps, kMostTileStages, (kDynamicOfBlock - 1024) / v.stage_bytes});
  params.early = p.frozen;
  return make_map<T, 2>(&params.x, data<T>(p.x), {size.k, size.rows}, {p.x_stride}, {64, params.tile_rows}) &&
         make_map<T, 2>(&params.weight, data<T>(p.weight), {size.k, p.n}, {p.weight.stride(0)}, {64, box});
}

template <typename T>
std::optional<Tensor> run(const Product& p, const Size& size, TileAct act) {
  const int device = p.x.get_device_index();
  const Plan plan = size.gated ? plan_for(kGated<T>, size, device) : plan_for(kPlain<T>, size, device);
  TileParams params{};
  if (!plan.variant || !fill<T>(params, plan, size, p)) return std::nullopt;
  const Variant& v = *plan.variant;
  const Tensor out = new_rows(p.x, size.columns);
  params.bias = p.bias ? data<T>(*p.bias) : nullptr;
  params.out = data<T>(out);
  launch_dependent(v.kernel,
                   {dim3(plan.clusters * v.split), dim3(v.threads), current_stream(p.x),
                    static_cast<size_t>(v.shared_bytes(params.stages)), static_cast<unsigned>(v.split)},
                   params, act);
  check_launch(size.gated ? "gated_linear" : "linear");
  return out;
}

std::optional<Tensor> run(const Product& p, TileAct act) {
  constexpr int64_t kMost = 1 << 24;
  const bool gated = act != TileAct::kNone;
  const int64_t columns = gated ? p.n / 2 : p.n;
  const bool fits = columns >= 8 && columns % 8 == 0 && p.n <= kMost && p.k >= 128 && p.k % 8 == 0 && p.k <= kMost;
  if (!kHopperKernels || p.rows < 1 || p.rows >= 1024 || !fits) return std::nullopt;
  const Guard guard(p.x.get_device_index());
  const Size size{p.rows, columns, p.k, gated};
  return p.x.scalar_type() == ScalarType::Half ? run<__half>(p, size, act) : run<__nv_bfloat16>(p, size, act);
}

}  // namespace

std::optional<Tensor> tile_linear(const Product& product) { return run(product, TileAct::kNone); }

std::optional<Tensor> tile_gated_linear(const Product& product, bool gelu_tanh) {
  return run(product, gelu_tanh ? TileAct::kGeluTanh : TileAct::kSilu);
}

}  // namespace raylm::cuda
