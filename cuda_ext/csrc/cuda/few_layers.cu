#include <algorithm>
#include <vector>

#include "launch.h"
#include "products.h"
#include "raylm/cuda/few_layers.cuh"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "few_layers";
constexpr int kLeastStages = 2;  // of a warp's ring: one is used while the other is filled
constexpr int kStatic = 10 * 1024;  // bytes of shared memory that the kernel has besides
static_assert(sizeof(FewAttentionShared<__half, 128>) + sizeof(FewRings) <= kStatic);

using Tensors = std::vector<Tensor>;

struct Model {
  int64_t rows, hidden, width, num_heads, num_kv_heads, head_dim, num_layers;
  FewForm form;  // of products
  int group;     // columns of a group of patches

  int64_t attended() const { return num_heads * head_dim; }
  int64_t qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

template <typename T>
void set_products(FewLayersArgs<T>& args, const Model& model) {
  const auto product = [&](int64_t n, int64_t k, bool gated = false) {
    const int64_t each = model.form != FewForm::kInt4 ? 8 : gated ? 2 * kPatchRows : kPatchRows;
    return FewProduct{static_cast<int>(n), static_cast<int>(k), static_cast<int>(n / each)};
  };
  args.products[kFewQkv] = product(model.qkv(), model.hidden);
  args.products[kFewO] = product(model.hidden, model.attended());
  args.products[kFewGateUp] = product(2 * model.width, model.hidden, true);
  args.products[kFewDown] = product(model.hidden, model.width);
  args.rows = static_cast<int>(model.rows);
  args.hidden = static_cast<int>(model.hidden);
  args.num_heads = static_cast<int>(model.num_heads);
  args.num_kv_heads = static_cast<int>(model.num_kv_heads);
  args.num_layers = static_cast<int>(model.num_layers);
  args.form = model.form;
}

// As many stages as shared memory has room for; head sizes share the size of a stage.
template <typename T>
int stages_of(const FewLayersArgs<T>& args) {
  const int room = kSharedOfBlock - kStatic - args.bytes_besides_rings();
  return std::min(kFewMostStages, room / (kFewWarps * FewStage<Plain<T>, 128>::kBytes));
}

FewForm form_of(bool scaled, int64_t group) {
  return scaled ? FewForm::kCodes : group ? FewForm::kInt4 : FewForm::kPlain;
}

bool fits(const Model& m, int32_t device) {
  const int64_t blocks = device_attribute(cudaDevAttrMultiProcessorCount, device);
  if (!kHopperKernels || compute_major(device) != 9 || m.num_layers > kFewMostLayers) return false;
  if (m.rows < 1 || m.rows > kFewRows || m.rows * m.num_kv_heads > blocks) return false;
  if (m.num_kv_heads < 1 || m.num_heads % m.num_kv_heads != 0 || m.num_heads / m.num_kv_heads > kFewGroup) return false;
  if (m.head_dim != 64 && m.head_dim != 128) return false;
  const int64_t unit = m.form == FewForm::kPlain ? 8 : 16;
  if (m.hidden % unit != 0 || m.width % unit != 0 || std::max(m.hidden, m.width) > (1 << 16)) return false;
  FewLayersArgs<__half> args{};
  set_products(args, m);
  return stages_of(args) >= kLeastStages;
}

// Where the cells of each phase begin, for kFewRows rows; the last is how many there are in all.
std::vector<int64_t> cell_starts(const Model& m) {
  std::vector<int64_t> starts{0};
  for (const int64_t outputs : {m.qkv(), m.attended(), m.hidden, m.width, m.hidden}) {
    starts.push_back(starts.back() + kFewRows * outputs / 2);
  }
  return starts;
}

void check_layers(const Model& m, const Tensors& products, const Tensors& scales, const Tensors& norms,
                  const Tensors& head_norms, const Tensors& biases, const Tensors& k_caches, const Tensors& v_caches,
                  const Tensor& x) {
  const auto count = [&](const char* name, const Tensors& list, int64_t each, bool optional) {
    const int64_t size = static_cast<int64_t>(list.size());
    if (size == m.num_layers * each || (optional && size == 0)) return;
    fail(kOp, name, " has ", size, " tensors, must have ", each, " for each of ", m.num_layers, " layers");
  };
  count("products", products, 4, false);
  count("scales", scales, 4, true);
  count("norms", norms, 2, false);
  count("head_norms", head_norms, 2, true);
  count("biases", biases, 1, true);
  count("v_caches", v_caches, 1, false);
  const int64_t sizes[4][2] = {
      {m.qkv(), m.hidden}, {m.hidden, m.attended()}, {2 * m.width, m.hidden}, {m.hidden, m.width}};
  const auto check = [&](const char* name, const Tensor& tensor, ScalarType dtype) {
    Arg(kOp, name, tensor).dtype({dtype}).on_device_of(x).contiguous();
    if (!is_aligned(tensor.data_ptr())) fail(kOp, name, " is not aligned to 16 bytes");
  };
  const ScalarType stored = m.form == FewForm::kPlain   ? x.scalar_type()
                            : m.form == FewForm::kCodes ? ScalarType::Float8_e4m3fn
                                                        : ScalarType::Byte;
  const bool in_patches = m.form == FewForm::kInt4;
  const int64_t patch = m.group == 128 ? Int4<__half, 128>::kPatchBytes : Int4<__half, 64>::kPatchBytes;
  for (size_t i = 0; i < products.size(); ++i) {
    const int64_t n = sizes[i % 4][0], k = sizes[i % 4][1], patches = divide_up(k, kPatchColumns);
    check("one of products", products[i], stored);
    Arg(kOp, "one of products", products[i]).dim(2);
    Arg(kOp, "one of products", products[i]).size(0, in_patches ? n / kPatchRows : n, "as the model's other sizes say");
    Arg(kOp, "one of products", products[i])
        .size(1, in_patches ? patches * patch : k, "as the model's other sizes say");
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    check("one of scales", scales[i], ScalarType::Float);
    Arg(kOp, "one of scales", scales[i]).dim(1).size(0, sizes[i % 4][0], "a scale a row of products");
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
void set_layers(FewLayersArgs<T>& args, const Tensors& products, const Tensors& scales, const Tensors& norms,
                const Tensors& head_norms, const Tensors& biases, const Tensors& k_caches, const Tensors& v_caches) {
  constexpr FewPhase kPhases[4] = {kFewQkv, kFewO, kFewGateUp, kFewDown};
  for (int i = 0; i < args.num_layers; ++i) {
    FewLayer<T>& layer = args.layers[i];
    for (int j = 0; j < 4; ++j) {
      layer.weights[kPhases[j]] = data<char>(products[4 * i + j]);
      if (args.form == FewForm::kCodes) layer.scales[kPhases[j]] = data<float>(scales[4 * i + j]);
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

// All blocks must live at once, as they wait for each other: a cooperative launch fails where they cannot.
template <typename N, int D>
void launch(const FewLayersArgs<typename N::Result>& args, int32_t device, cudaStream_t stream) {
  const int shared = args.bytes_besides_rings() + args.stages * kFewWarps * FewStage<N, D>::kBytes;
  allow_shared<few_layers_kernel<N, D>>(kOp, device, kSharedOfBlock - kStatic);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(device_attribute(cudaDevAttrMultiProcessorCount, device));
  config.blockDim = dim3(kFewLaunched);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, few_layers_kernel<N, D>, args);  // its error is read by check_launch
}

template <typename N>
void launch(const FewLayersArgs<typename N::Result>& args, int64_t head_dim, int32_t device, cudaStream_t stream) {
  head_dim == 64 ? launch<N, 64>(args, device, stream) : launch<N, 128>(args, device, stream);
}

// Most rows that the kernel takes of a model at a time; 0 where it takes none, on this device or of this shape.
int64_t few_layers_rows(Tensor x, int64_t width, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t num_layers, bool scaled, int64_t group) {
  if (x.scalar_type() == ScalarType::Float || (group != 0 && group != 64 && group != 128)) return 0;
  Model model{kFewRows, x.size(1), width, num_heads, num_kv_heads, head_dim, num_layers, form_of(scaled, group),
              static_cast<int>(group)};
  while (model.rows > 0 && !fits(model, x.get_device_index())) --model.rows;
  return model.rows;
}

void few_layers(Tensor residual, Tensors products, Tensors scales, Tensors norms, Tensors head_norms, Tensors biases,
                int64_t group, Tensors k_caches, Tensors v_caches, Tensor positions, Tensor slot_mapping,
                Tensor seq_lens, Tensor block_table, Tensor cos_sin, double eps, double scale, bool gelu_tanh,
                Tensor cells, Tensor counters) {
  Arg(kOp, "residual", residual).dtype({ScalarType::BFloat16, ScalarType::Half}).dim(2).contiguous();
  Arg(kOp, "cos_sin", cos_sin).dim(2);
  if (k_caches.empty() || products.size() < 4) fail(kOp, "there are no layers");
  Arg(kOp, "one of the caches", k_caches[0]).dim(4);
  if (group != 0 && group != 64 && group != 128) fail(kOp, "group is ", group, ", must be 0, 64 or 128");
  const int64_t unit = group ? kPatchRows : 1;
  const int64_t head_dim = cos_sin.size(1);
  if (head_dim < 1) fail(kOp, "cos_sin has no columns");
  const int64_t kv_heads = k_caches[0].size(2), heads = products[0].size(0) * unit / head_dim - 2 * kv_heads;
  const Model model{residual.size(0), residual.size(1), products[2].size(0) * unit / 2, heads, kv_heads, head_dim,
                    static_cast<int64_t>(k_caches.size()), form_of(!scales.empty(), group), static_cast<int>(group)};
  const int32_t device = residual.get_device_index();
  if (!fits(model, device)) fail(kOp, "it does not take ", model.rows, " rows of this model on this device");
  check_layers(model, products, scales, norms, head_norms, biases, k_caches, v_caches, residual);
  const FewStep step =
      step_of(model, positions, slot_mapping, seq_lens, block_table, cos_sin, k_caches[0], v_caches[0]);
  const std::vector<int64_t> starts = cell_starts(model);
  const int64_t columns = kFewRows * model.num_kv_heads;
  Arg(kOp, "cells", cells).dtype({ScalarType::Long}).on_device_of(residual).contiguous();
  Arg(kOp, "cells", cells).dim(1).size(0, starts.back(), "as few_layers_memory makes it");
  Arg(kOp, "counters", counters).dtype({ScalarType::Int}).on_device_of(residual).contiguous();
  Arg(kOp, "counters", counters).dim(1).size(0, columns + 2, "as few_layers_memory makes it");
  const Guard guard(device);
  const int64_t part_rows = model.rows * model.num_kv_heads * kFewMostParts * kFewGroup;
  const Tensor parts = torch::stable::new_empty(cos_sin, {part_rows * (head_dim + 1)});
  by_dtype(residual, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      FewLayersArgs<T> args{};
      set_products(args, model);
      set_layers(args, products, scales, norms, head_norms, biases, k_caches, v_caches);
      args.step = step;
      args.eps = static_cast<float>(eps), args.scale = static_cast<float>(scale), args.gelu = gelu_tanh;
      args.residual = data<T>(residual);
      for (int i = 0; i < kFewPhases; ++i) args.cells[i] = data<uint2>(cells) + starts[i];
      args.part_sums = data<float>(parts), args.part_logs = args.part_sums + part_rows * head_dim;
      args.launches = data<unsigned>(counters), args.arrivals = args.launches + 2;
      args.stages = stages_of(args);
      const cudaStream_t stream = current_stream(residual);
      switch (model.form) {
        case FewForm::kPlain: return launch<Plain<T>>(args, head_dim, device, stream);
        case FewForm::kCodes: return launch<Scaled<T>>(args, head_dim, device, stream);
        default:
          return group == 128 ? launch<Int4<T, 128>>(args, head_dim, device, stream)
                              : launch<Int4<T, 64>>(args, head_dim, device, stream);
      }
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
