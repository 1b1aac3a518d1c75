#include "few_layers.h"

#include <optional>
#include <vector>

#include "patches.h"
#include "peers.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "few_layers";

using Tensors = std::vector<Tensor>;

struct Model {
  int64_t rows, hidden, width, num_heads, num_kv_heads, head_dim, num_layers;  // width: of a mixture, an expert's
  FewForm form;
  int group;                   // columns of a group of patches
  int64_t experts, per_token;  // 0 where there is no mixture

  int64_t attended() const { return num_heads * head_dim; }
  int64_t qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  int64_t activated() const { return per_token ? per_token * width : width; }
  bool in_patches(bool of_experts) const {
    return form == FewForm::kInt4 || form == FewForm::kFp8 || (of_experts && form == FewForm::kCodes);
  }
  int64_t patch_bytes() const { return bytes_of_patch(form == FewForm::kInt4 ? 4 : 8, group == 64 ? 6 : 7); }
};

void set_mixture(FewMixture& mixture, const Model& m, int64_t tiles) {
  const auto inverse = [](int64_t divisor) { return static_cast<unsigned>((int64_t{1} << 32) / divisor + 1); };
  const bool patches = m.in_patches(true);
  const auto stack = [&](int64_t n, int64_t k, int64_t rows_of_tile) {
    const int64_t row = patches ? k / kPatchColumns * m.patch_bytes() : k * 2;
    return FewStack{patches ? n / kPatchRows * row : n * row, patches ? row : rows_of_tile * row};
  };
  mixture.experts = static_cast<int>(m.experts), mixture.per_token = static_cast<int>(m.per_token);
  mixture.size = static_cast<int>(m.width), mixture.tiles = static_cast<int>(tiles);
  mixture.of_size = inverse(m.width), mixture.of_tiles = inverse(tiles);
  mixture.gate_up = stack(2 * m.width, m.hidden, 4), mixture.down = stack(m.hidden, m.width, 8);
}

template <typename T>
void set_products(FewLayersArgs<T>& args, const Model& m) {
  const auto product = [](int64_t n, int64_t k, int64_t each) {
    return FewProduct{static_cast<int>(n), static_cast<int>(k), static_cast<int>(n / each)};
  };
  const int64_t each = m.in_patches(false) ? kPatchRows : m.form == FewForm::kCodes ? kFewCodeRows : 8;
  const bool patches = m.in_patches(m.per_token > 0);  // of the MLP
  args.products[kFewQkv] = product(m.qkv(), m.hidden, each);
  args.products[kFewO] = product(m.hidden, m.attended(), each);
  if (m.per_token) args.products[kFewRouter] = product(m.experts, m.hidden, 8);
  args.products[kFewGateUp] = product(2 * m.activated(), m.hidden, patches ? 2 * kPatchRows : each);
  args.products[kFewDown] = product(m.hidden, m.activated(), patches ? kPatchRows : each);
  args.rows = static_cast<int>(m.rows);
  args.hidden = static_cast<int>(m.hidden);
  args.num_heads = static_cast<int>(m.num_heads);
  args.num_kv_heads = static_cast<int>(m.num_kv_heads);
  args.num_layers = static_cast<int>(m.num_layers);
  if (m.per_token) set_mixture(args.mixture, m, args.products[kFewGateUp].tiles / m.per_token);
}

// Of what patches hold, or -1. Nothing where there are no kernels for them.
std::optional<FewForm> form_of(bool scaled, int64_t numbers, int64_t group) {
  if (numbers == static_cast<int64_t>(Numbers::kFp8)) return scaled ? FewForm::kCodes : FewForm::kFp8;
  if (numbers == static_cast<int64_t>(Numbers::kInt4) && (group == 64 || group == 128)) return FewForm::kInt4;
  if (numbers != -1) return std::nullopt;
  return scaled ? FewForm::kCodes : FewForm::kPlain;
}

bool fits_mixture(const Model& m) {
  return m.rows == 1 && m.head_dim == 128 && m.group != 64 && m.experts % 8 == 0 && m.experts <= kFewExperts &&
         m.per_token <= std::min<int64_t>(kFewChosen, m.experts) && m.width % kFewExpertColumns == 0 &&
         m.hidden % kPatchColumns == 0;
}

bool fits(const Model& m, const Tensor& x) {
  const int32_t device = x.get_device_index();
  const int64_t blocks = device_attribute(cudaDevAttrMultiProcessorCount, device);
  if (!kHopperKernels || compute_major(device) != 9 || m.num_layers > kFewMostLayers) return false;
  if (m.rows < 1 || m.rows > kFewRows || m.rows * m.num_kv_heads > blocks) return false;
  if (m.num_kv_heads < 1 || m.num_heads % m.num_kv_heads != 0 || m.num_heads / m.num_kv_heads > kFewGroup) return false;
  if (m.head_dim != 64 && m.head_dim != 128) return false;
  if (m.per_token && !fits_mixture(m)) return false;
  const bool fp8_patches = m.form == FewForm::kFp8 || (m.per_token && m.form == FewForm::kCodes);
  if (fp8_patches && x.scalar_type() != ScalarType::BFloat16) return false;
  const int64_t unit = m.form == FewForm::kPlain ? 8 : 16;
  if (m.hidden % unit != 0 || m.width % unit != 0 || std::max(m.hidden, m.activated()) > (1 << 16)) return false;
  FewLayersArgs<__nv_bfloat16> args{};
  set_products(args, m);
  with_weights<__nv_bfloat16>(m.form, m.group, m.per_token > 0, [&](auto attention, auto experts) {
    share_out<decltype(attention), decltype(experts)>(args);
  });
  return args.stages >= kFewLeastStages;
}

// Where the cells of each phase begin, for kFewRows rows; the last is how many there are in all.
std::vector<int64_t> cell_starts(const Model& m) {
  std::vector<int64_t> starts{0};
  for (const int64_t outputs : {m.qkv(), m.attended(), m.hidden, m.experts, m.activated(), m.hidden}) {
    starts.push_back(starts.back() + kFewRows * outputs / 2);
  }
  return starts;
}

// The products of a layer, in their order.
std::vector<FewPhase> phases_of(const Model& m) {
  if (m.per_token) return {kFewQkv, kFewO, kFewRouter, kFewGateUp, kFewDown};
  return {kFewQkv, kFewO, kFewGateUp, kFewDown};
}

void check_product(const Model& m, FewPhase phase, const Tensor& product, const Tensor& x) {
  constexpr const char* kName = "one of products";
  const bool of_experts = m.per_token && (phase == kFewGateUp || phase == kFewDown);
  const bool in_patches = phase != kFewRouter && m.in_patches(of_experts);
  const bool plain = phase == kFewRouter || m.form == FewForm::kPlain;
  const ScalarType stored = plain ? x.scalar_type() : in_patches ? ScalarType::Byte : ScalarType::Float8_e4m3fn;
  const int64_t n = phase == kFewQkv      ? m.qkv()
                    : phase == kFewRouter ? m.experts
                    : phase == kFewGateUp ? 2 * m.width
                                          : m.hidden;
  const int64_t k = phase == kFewO ? m.attended() : phase == kFewDown ? m.width : m.hidden;
  Arg(kOp, kName, product).dtype({stored}).on_device_of(x).contiguous();
  if (!is_aligned(product.data_ptr())) fail(kOp, kName, " is not aligned to 16 bytes");
  Arg(kOp, kName, product).dim(of_experts ? 3 : 2);
  if (of_experts) Arg(kOp, kName, product).size(0, m.experts, "the router's experts");
  const int rows = of_experts ? 1 : 0;
  Arg(kOp, kName, product).size(rows, in_patches ? n / kPatchRows : n, "as the model's other sizes say");
  Arg(kOp, kName, product)
      .size(rows + 1, in_patches ? divide_up(k, kPatchColumns) * m.patch_bytes() : k, "as the model's other sizes say");
}

void check_layers(const Model& m, const Tensors& products, const Tensors& scales, const Tensors& norms,
                  const Tensors& head_norms, const Tensors& biases, const Tensors& k_caches, const Tensors& v_caches,
                  const Tensor& x) {
  const auto count = [&](const char* name, const Tensors& list, int64_t each, bool optional) {
    const int64_t size = static_cast<int64_t>(list.size());
    if (size == m.num_layers * each || (optional && size == 0)) return;
    fail(kOp, name, " has ", size, " tensors, must have ", each, " for each of ", m.num_layers, " layers");
  };
  const std::vector<FewPhase> phases = phases_of(m);
  const int64_t each = static_cast<int64_t>(phases.size()), num_scales = m.per_token ? 2 : 4;
  count("products", products, each, false);
  count("scales", scales, num_scales, true);
  count("norms", norms, 2, false);
  count("head_norms", head_norms, 2, true);
  count("biases", biases, 1, true);
  count("v_caches", v_caches, 1, false);
  const auto check = [&](const char* name, const Tensor& tensor, ScalarType dtype) {
    Arg(kOp, name, tensor).dtype({dtype}).on_device_of(x).contiguous();
    if (!is_aligned(tensor.data_ptr())) fail(kOp, name, " is not aligned to 16 bytes");
  };
  for (size_t i = 0; i < products.size(); ++i) check_product(m, phases[i % each], products[i], x);
  const int64_t rows[4] = {m.qkv(), m.hidden, 2 * m.width, m.hidden};
  for (size_t i = 0; i < scales.size(); ++i) {
    check("one of scales", scales[i], ScalarType::Float);
    Arg(kOp, "one of scales", scales[i]).dim(1).size(0, rows[i % num_scales], "a scale a row of products");
  }
  const auto check_vectors = [&](const char* name, const Tensors& vectors, int64_t size) {
    for (const Tensor& vector : vectors) {
      check(name, vector, x.scalar_type());
      Arg(kOp, name, vector).size(0, size, "as the model's other sizes say");
    }
  };
  check_vectors("one of norms", norms, m.hidden);
  check_vectors("one of head_norms", head_norms, m.head_dim);
  check_vectors("one of biases", biases, m.qkv());
  for (const Tensors* caches : {&k_caches, &v_caches}) {
    for (const Tensor& cache : *caches) {
      Arg(kOp, "one of the caches", cache).dtype({x.scalar_type()}).on_device_of(x).dim(4).last_contiguous();
      for (int d = 0; d < 4; ++d) Arg(kOp, "one of the caches", cache).size(d, (*caches)[0].size(d), "as the first");
      for (int d = 0; d < 3; ++d) {
        const int64_t stride = cache.stride(d);
        if (stride == (*caches)[0].stride(d) && stride % 8 == 0) continue;
        fail(kOp, "one of the caches has stride ", stride, " in dimension ", d,
             ", must be the first one's and a multiple of 8");
      }
    }
  }
}

template <typename T>
void set_layers(FewLayersArgs<T>& args, const std::vector<FewPhase>& phases, const Tensors& products,
                const Tensors& scales, const Tensors& norms, const Tensors& head_norms, const Tensors& biases,
                const Tensors& k_caches, const Tensors& v_caches) {
  const size_t each = phases.size(), num_scales = scales.size() / args.num_layers;
  for (int i = 0; i < args.num_layers; ++i) {
    FewLayer<T>& layer = args.layers[i];
    for (size_t j = 0; j < each; ++j) {
      layer.weights[phases[j]] = data<char>(products[each * i + j]);
      if (j < num_scales) layer.scales[phases[j]] = data<float>(scales[num_scales * i + j]);
    }
    layer.attention_norm = data<T>(norms[2 * i]);
    layer.mlp_norm = data<T>(norms[2 * i + 1]);
    if (!head_norms.empty()) layer.q_norm = data<T>(head_norms[2 * i]), layer.k_norm = data<T>(head_norms[2 * i + 1]);
    if (!biases.empty()) layer.qkv_bias = data<T>(biases[i]);
    layer.k_cache = data<T>(k_caches[i]);
    layer.v_cache = data<T>(v_caches[i]);
  }
}

FewStrides strides_of(const Tensor& cache) { return {cache.stride(0), cache.stride(1), cache.stride(2)}; }

FewStep step_of(const Model& m, const Tensor& positions, const Tensor& slot_mapping, const Tensor& seq_lens,
                const Tensor& block_table, const Tensor& cos_sin, const Tensor& k_cache, const Tensor& v_cache) {
  Arg(kOp, "positions", positions).dtype({ScalarType::Long}).dim(1).size(0, m.rows, "rows").contiguous();
  Arg(kOp, "slot_mapping", slot_mapping).dtype({ScalarType::Long}).dim(1).size(0, m.rows, "rows").contiguous();
  Arg(kOp, "seq_lens", seq_lens).dtype({ScalarType::Int}).dim(1).size(0, m.rows, "rows").contiguous();
  Arg(kOp, "block_table", block_table).dtype({ScalarType::Int}).dim(2).size(0, m.rows, "rows").last_contiguous();
  Arg(kOp, "cos_sin", cos_sin).dtype({ScalarType::Float}).dim(2).size(1, m.head_dim, "the head size").contiguous();
  for (const Tensor* tensor : {&positions, &slot_mapping, &seq_lens, &block_table, &cos_sin}) {
    Arg(kOp, "one of positions, slot_mapping, seq_lens, block_table and cos_sin", *tensor).on_device_of(k_cache);
  }
  const int64_t block_size = k_cache.size(1);
  int log2 = 0;
  while ((int64_t{1} << log2) < block_size) ++log2;
  if (block_size < kFewKeys || int64_t{1} << log2 != block_size) {
    fail(kOp, "blocks have ", block_size, " slots, must have a power of two of at least ", kFewKeys);
  }
  FewStep step{};
  step.positions = data<int64_t>(positions);
  step.slots = data<int64_t>(slot_mapping);
  step.seq_lens = data<int32_t>(seq_lens);
  step.block_table = data<int32_t>(block_table);
  step.block_table_stride = block_table.stride(0);
  step.cos_sin = data<float>(cos_sin);
  step.max_position = cos_sin.size(0);
  step.num_slots = k_cache.size(0) * block_size;
  step.block_log2 = log2;
  step.k_strides = strides_of(k_cache);
  step.v_strides = strides_of(v_cache);
  return step;
}

template <typename T>
void launch(const Model& m, FewLayersArgs<T>& args, int32_t device, cudaStream_t stream) {
  const bool mixture = m.per_token > 0;
  with_weights<T>(m.form, m.group, mixture, [&](auto attention, auto experts) {
    using N = decltype(attention);
    share_out<N, decltype(experts)>(args);
    if constexpr (!kHasExperts<decltype(experts)>) {
      m.head_dim == 64 ? launch_few<N, NoExperts, 64>(kOp, args, device, stream)
                       : launch_few<N, NoExperts, 128>(kOp, args, device, stream);
    }
  });
  if (mixture) launch_mixture(kOp, m.form, args, device, stream);
}

// Most rows that the kernel takes of a model at a time; 0 where it takes none, on this device or of this shape.
int64_t few_layers_rows(Tensor x, int64_t width, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t num_layers, bool scaled, int64_t numbers, int64_t group, int64_t experts,
                        int64_t per_token) {
  const std::optional<FewForm> form = form_of(scaled, numbers, group);
  if (x.scalar_type() == ScalarType::Float || !form) return 0;
  Model model{kFewRows, x.size(1), width, num_heads, num_kv_heads, head_dim, num_layers, *form, static_cast<int>(group),
              experts, per_token};
  while (model.rows > 0 && !fits(model, x)) --model.rows;
  return model.rows;
}

void few_layers(Tensor residual, Tensors products, Tensors scales, Tensors norms, Tensors head_norms, Tensors biases,
                int64_t numbers, int64_t group, int64_t per_token, bool sigmoid, bool normalized, double route_scale,
                Tensors k_caches, Tensors v_caches, Tensor positions, Tensor slot_mapping, Tensor seq_lens,
                Tensor block_table, Tensor cos_sin, double eps, double scale, bool gelu_tanh, Tensor cells,
                Tensor counters, std::optional<Tensor> windows, int64_t rank, int64_t capacity, double limit_s) {
  Arg(kOp, "residual", residual).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).contiguous();
  Arg(kOp, "cos_sin", cos_sin).dim(2);
  if (k_caches.empty() || products.size() < 4) fail(kOp, "there are no layers");
  Arg(kOp, "one of the caches", k_caches[0]).dim(4);
  const std::optional<FewForm> form = form_of(!scales.empty(), numbers, group);
  if (!form) fail(kOp, "there are no kernels for numbers ", numbers, " in groups of ", group);
  const int64_t head_dim = cos_sin.size(1);
  if (head_dim < 1) fail(kOp, "cos_sin has no columns");
  const auto rows_of = [](const Tensor& weight) {
    return weight.size(weight.dim() - 2) * (weight.scalar_type() == ScalarType::Byte ? kPatchRows : 1);
  };
  for (const Tensor& product : products) {
    if (product.dim() < 2) fail(kOp, "one of products has ", product.dim(), " dimensions, must have 2 or more");
  }
  const int64_t kv_heads = k_caches[0].size(2), heads = rows_of(products[0]) / head_dim - 2 * kv_heads;
  const Model model{residual.size(0), residual.size(1), rows_of(products[per_token ? 3 : 2]) / 2, heads, kv_heads,
                    head_dim, static_cast<int64_t>(k_caches.size()), *form, static_cast<int>(group),
                    per_token ? products[2].size(0) : 0, per_token};
  const int32_t device = residual.get_device_index();
  if (!fits(model, residual)) fail(kOp, "it does not take ", model.rows, " rows of this model on this device");
  check_layers(model, products, scales, norms, head_norms, biases, k_caches, v_caches, residual);
  const FewStep step =
      step_of(model, positions, slot_mapping, seq_lens, block_table, cos_sin, k_caches[0], v_caches[0]);
  const std::vector<int64_t> starts = cell_starts(model);
  const int64_t columns = kFewRows * model.num_kv_heads;
  Arg(kOp, "cells", cells).dtype({ScalarType::Long}).on_device_of(residual).contiguous();
  Arg(kOp, "cells", cells).dim(1).size(0, starts.back(), "as few_layers_memory makes it");
  Arg(kOp, "counters", counters).dtype({ScalarType::Int}).on_device_of(residual).contiguous();
  Arg(kOp, "counters", counters).dim(1).size(0, columns + 2, "as few_layers_memory makes it");
  Peers peers{};
  if (windows) {
    peers = make_peers(kOp, *windows, rank, capacity, limit_s);
    const int64_t least = peers.ranks * kFewRows * model.hidden / 2 * static_cast<int64_t>(sizeof(uint2));
    if (capacity < least) fail(kOp, "capacity is ", capacity, ", must be at least ", least, " bytes");
  }
  const Guard guard(device);
  const int64_t part_rows = model.rows * model.num_kv_heads * kFewMostParts * kFewGroup;
  const Tensor parts = torch::stable::new_empty(cos_sin, {part_rows * (head_dim + 1)});
  by_dtype(residual, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      FewLayersArgs<T> args{};
      set_products(args, model);
      set_layers(args, phases_of(model), products, scales, norms, head_norms, biases, k_caches, v_caches);
      args.step = step;
      args.eps = static_cast<float>(eps), args.scale = static_cast<float>(scale), args.gelu = gelu_tanh;
      args.mixture.sigmoid = sigmoid, args.mixture.normalized = normalized;
      args.mixture.scale = static_cast<float>(route_scale);
      args.residual = data<T>(residual);
      args.peers = peers;
      for (int i = 0; i < kFewPhases; ++i) args.cells[i] = data<uint2>(cells) + starts[i];
      args.part_sums = data<float>(parts), args.part_logs = args.part_sums + part_rows * head_dim;
      args.launches = data<unsigned>(counters), args.arrivals = args.launches + 2;
      launch(model, args, device, current_stream(residual));
    }
  });
  check_launch(kOp);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("few_layers", TORCH_BOX(&few_layers));
  m.impl("few_layers_rows", TORCH_BOX(&few_layers_rows));
}

}  // namespace raylm::cuda
