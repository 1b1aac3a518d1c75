#include <algorithm>
#include <optional>

#include "products.h"
#include "raylm/cuda/skinny_linear.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

constexpr int kWarpsOfBlock = 8;
constexpr int kStages = 2;
constexpr int kSharedOfMultiprocessor = 228 * 1024;
constexpr int kSharedBesides = 2 * 1024;  // of a block: what the driver takes, the barriers
constexpr int64_t kSmallWeight = 16 << 20;  // bytes; below, a product takes about as long as a launch

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[3] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                           torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Among how many warps k is split: by the bytes of a row of W alone, because the order of each sum follows from it. Each
// has as few blocks of k as 8 warps allow.
int split_of(int64_t depth) {
  const int64_t blocks = divide_up(depth, kSkinnyBytes);
  const int64_t each = divide_up(blocks, kWarpsOfBlock);
  const int64_t warps = divide_up(blocks, each);
  return static_cast<int>(warps <= 1 ? 1 : warps <= 2 ? 2 : warps <= 4 ? 4 : warps);
}

struct Plan {
  int groups;  // of 8 rows of x; 0: the product is for torch's library
  int tiles;   // groups of 8 rows of weight that a team takes at a time
};

int shared_bytes(bool scaled, Plan plan, int64_t rows, int64_t k) {
  const int split = split_of(scaled ? k : 2 * k), warps = kWarpsOfBlock / split * split;
  return skinny_shared_bytes(scaled, plan.groups, plan.tiles, kStages, warps, static_cast<int>(rows),
                             static_cast<int>(k));
}

bool is_small(int64_t n, int64_t depth) { return n * depth < kSmallWeight; }

// Where the kernel was measured to be faster than torch's library (H200). Two groups of weight rows at a time halve the
// reading of x, and bring more of a small weight with the first copies.
Plan plan_for(int64_t rows, int64_t n, int64_t k) {
  constexpr Plan kTorch{0, 0};
  if (rows < 1 || rows > 16 || n < 1 || k < 8 || k % 8 != 0 || k > (1 << 20) || n > (1 << 30)) return kTorch;
  const Plan plan{rows <= 8 ? 1 : 2, is_small(n, 2 * k) || (rows > 8 && k <= 1024) ? 2 : 1};
  const bool many_columns = n >= 65536, square = n <= 4096 && k < 4096;
  if (rows > 8 && !many_columns && !square) return kTorch;
  return shared_bytes(false, plan, rows, k) + kSharedBesides <= kSharedOfBlock ? plan : kTorch;
}

// Of 8-bit numbers: tiles of as many bytes as large weights of 16 bits have. Weights neither small nor very large were
// measured to be read faster by the kernel of tiles, from two rows on or where k is long (H100).
Plan scaled_plan_for(int64_t rows, int64_t n, int64_t k, bool anyway) {
  constexpr int64_t kLargeWeight = 64 << 20, kLong = 8192;
  constexpr Plan kNone{0, 0}, plan{1, 2};
  if (rows < 1 || rows > 8 || n < 1 || k < 16 || k % 16 != 0 || k > (1 << 20) || n > (1 << 30)) return kNone;
  const bool prefers_tiles = !is_small(n, k) && n * k < kLargeWeight && (rows > 1 || k > kLong);
  if (prefers_tiles && !anyway) return kNone;
  return shared_bytes(true, plan, rows, k) + kSharedBesides <= kSharedOfBlock ? plan : kNone;
}

struct Grid {
  int blocks, shared;
};

// A large weight gets one block a multiprocessor, and so much shared memory that there can be no second: more copies
// in flight from more places make memory slower, and a multiprocessor with two blocks would finish late. For a small
// weight what counts is that all of it is asked for at once, evenly.
Grid grid_of(bool small, int shared, int blocks, int multiprocessors) {
  if (!small) {
    const int no_second = kSharedOfMultiprocessor / 2 + 2 * 1024;
    return {std::min(blocks, multiprocessors), std::max(shared, no_second)};
  }
  const int resident = multiprocessors * std::clamp(kSharedOfMultiprocessor / (shared + kSharedBesides), 1, 4);
  const int turns = divide_up(blocks, resident);
  return {divide_up(blocks, turns), shared};
}

template <typename N, typename Results, int Groups, int Tiles>
void launch(SkinnyArgs<N> args, int32_t device, cudaStream_t stream) {
  constexpr auto* kernel = skinny_linear_kernel<N, Results, Groups, Tiles, kStages, kWarpsOfBlock>;
  const int64_t depth = args.k * static_cast<int64_t>(sizeof(typename N::Stored));
  args.split = split_of(depth);
  args.tiles = divide_up(Results::outputs(args.n), Results::outputs(8 * Tiles));
  const int teams = kWarpsOfBlock / args.split;
  const Grid grid = grid_of(is_small(args.n, depth), shared_bytes(N::kScaled, {Groups, Tiles}, args.rows, args.k),
                            divide_up(args.tiles, teams), device_attribute(cudaDevAttrMultiProcessorCount, device));
  allow_shared<kernel>("linear", device, kDynamicOfBlock);
  const dim3 block(teams * args.split * kWarp);
  launch_dependent(kernel, {dim3(grid.blocks), block, stream, static_cast<size_t>(grid.shared)}, args);
}

template <typename N, typename Results, int Groups>
void launch(Plan plan, const SkinnyArgs<N>& args, int32_t device, cudaStream_t stream) {
  plan.tiles == 1 ? launch<N, Results, Groups, 1>(args, device, stream)
                  : launch<N, Results, Groups, 2>(args, device, stream);
}

bool has_aligned_rows(const Tensor& tensor, int64_t stride) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 && stride % 8 == 0;
}

// Whether the kernels for few rows take such tensors at all.
bool fits(const Product& p) {
  return p.x.scalar_type() != ScalarType::Float && (p.x.dim() == 2 || p.x.is_contiguous()) &&
         has_aligned_rows(p.x, p.x_stride) && has_aligned_rows(p.weight, p.weight.stride(0)) &&
         compute_major(p.x.get_device_index()) == 9;
}

template <typename N>
SkinnyArgs<N> args_of(const Product& p, const Tensor& out) {
  SkinnyArgs<N> args{};
  args.x = data<typename N::Stored>(p.x);
  args.weight = data<typename N::Stored>(p.weight);
  args.bias = p.bias.has_value() ? data<typename N::Result>(*p.bias) : nullptr;
  args.out = data<typename N::Result>(out);
  if (p.scales) args.x_scales = data<float>(*p.x_scales), args.scales = data<float>(*p.scales);
  args.x_stride = p.x_stride;
  args.weight_stride = p.weight.stride(0);
  args.rows = static_cast<int>(p.rows);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.early = p.frozen;
  return args;
}

template <typename T>
void run_plain(const Product& product, Plan plan, const Tensor& out) {
  const int32_t device = product.x.get_device_index();
  const cudaStream_t stream = current_stream(product.x);
  const SkinnyArgs<Plain<T>> args = args_of<Plain<T>>(product, out);
  plan.groups == 1 ? launch<Plain<T>, SkinnyPlain, 1>(plan, args, device, stream)
                   : launch<Plain<T>, SkinnyPlain, 2>(plan, args, device, stream);
}

template <typename T>
void run_gated(const Product& product, Plan plan, bool gelu_tanh, const Tensor& out) {
  const int32_t device = product.x.get_device_index();
  const cudaStream_t stream = current_stream(product.x);
  const SkinnyArgs<Plain<T>> args = args_of<Plain<T>>(product, out);
  gelu_tanh ? launch<Plain<T>, SkinnyGated<GeluTanh>, 1>(plan, args, device, stream)
            : launch<Plain<T>, SkinnyGated<Silu>, 1>(plan, args, device, stream);
}

}  // namespace

// Up to 64 rows of 16-bit numbers have kernels here; all else goes to torch, whose library is made for it.
Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool frozen) {
  check_linear("linear", x, weight, bias.has_value() ? &*bias : nullptr);
  Arg("linear", "weight", weight).on_device_of(x);
  if (bias.has_value()) Arg("linear", "bias", *bias).on_device_of(x);
  const Product product{x, weight, bias, frozen};
  if (!fits(product)) return torch_linear(x, weight, bias);
  const Plan plan = plan_for(product.rows, product.n, product.k);
  if (plan.groups == 0) {
    std::optional<Tensor> out = tile_linear(product);
    if (!out) out = split_linear(product);
    return out ? *out : torch_linear(x, weight, bias);
  }
  const Guard guard(x.get_device_index());
  const Tensor out = new_rows(x, product.n);
  x.scalar_type() == ScalarType::Half ? run_plain<__half>(product, plan, out)
                                      : run_plain<__nv_bfloat16>(product, plan, out);
  check_launch("linear");
  return out;
}

// As linear, but each sum over k has one order, however many rows x has. Which weights it takes, Python knows
// (raylm/ops/invariant.py): all else goes to torch there.
Tensor invariant_linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool frozen) {
  const char* op = "invariant_linear";
  Arg(op, "x", x).dim(2);
  check_linear(op, x, weight, bias.has_value() ? &*bias : nullptr);
  Arg(op, "weight", weight).on_device_of(x);
  if (bias.has_value()) Arg(op, "bias", *bias).on_device_of(x);
  const Product product{x, weight, bias, frozen};
  if (product.rows == 0) return new_rows(x, product.n);
  const std::optional<Tensor> out = fits(product) ? tile_linear(product, true) : std::nullopt;
  if (!out) {
    fail(op, "has no kernel for x of ", product.rows, " rows and weight of ", product.n, " rows of ", product.k,
         " here: 16-bit numbers, rows of a multiple of 8 from 128 on that are aligned to 16 bytes, and a number of them "
         "that is a multiple of 8, on Hopper");
  }
  return *out;
}

std::optional<Tensor> fused_gated_linear(const Product& product, bool gelu_tanh) {
  if (!fits(product)) return std::nullopt;
  const Plan plan = plan_for(product.rows, product.n, product.k);
  if (plan.groups != 1) return product.bias ? std::nullopt : tile_gated_linear(product, gelu_tanh);
  const Tensor& x = product.x;
  const Guard guard(x.get_device_index());
  const Tensor out = new_rows(x, product.n / 2);
  x.scalar_type() == ScalarType::Half ? run_gated<__half>(product, plan, gelu_tanh, out)
                                      : run_gated<__nv_bfloat16>(product, plan, gelu_tanh, out);
  check_launch("gated_linear");
  return out;
}

std::optional<Tensor> few_scaled_linear(const Product& product, bool anyway) {
  const Plan plan = scaled_plan_for(product.rows, product.n, product.k, anyway);
  if (plan.groups == 0) return std::nullopt;
  const int32_t device = product.x.get_device_index();
  const Guard guard(device);
  const Tensor out = new_rows(product.x, product.n, product.result);
  const auto run = [&](auto numbers) {
    using N = decltype(numbers);
    launch<N, SkinnyPlain, 1, 2>(args_of<N>(product, out), device, current_stream(product.x));
  };
  product.result == ScalarType::Half ? run(Scaled<__half>{}) : run(Scaled<__nv_bfloat16>{});
  check_launch("scaled_linear");
  return out;
}

// Up to how many rows of x the products with such a weight have kernels here, on its device; 0: none.
int64_t linear_rows(Tensor weight) {
  const bool has = weight.scalar_type() != ScalarType::Float && compute_major(weight.get_device_index()) == 9;
  return !has ? 0 : kHopperKernels ? 64 : 16;
}

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("invariant_linear", TORCH_BOX(&invariant_linear));
  m.impl("linear_rows", TORCH_BOX(&linear_rows));
}

}  // namespace raylm::cuda
