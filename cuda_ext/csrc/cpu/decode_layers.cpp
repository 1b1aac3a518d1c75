#include <algorithm>
#include <vector>

#include "attention_plan.h"
#include "common.h"
#include "layer_products.h"
#include "phases.h"

namespace raylm {
namespace {

constexpr const char* kOp = "decode_layers";
constexpr int64_t kPlain = -1;            // kind of a weight that is not in blocks
constexpr int64_t kPiecesPerThread = 4;  // of a product: a thread that is held up leaves its own to others
constexpr int64_t kGroupsTogether = kQuantised / kLinearColumns;  // of a gated product: what shares a scale afterwards

using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

// Of one layer, in this order. An empty phase costs nothing.
enum Phase : int64_t {
  kAttentionNorm,  // adds what the layer before has left to the residual stream, norms, quantises
  kQkv,
  kRope,  // norms heads, rotates, stores
  kAttend,
  kMerge,  // joins the parts of long sequences, quantises
  kO,
  kMlpNorm,
  kGateUp,  // in blocks: with activation and quantisation
  kActivate,
  kDown,
  kPhasesOfLayer
};

struct Model {
  int64_t rows, hidden, width, num_heads, num_kv_heads, head_dim, num_layers;

  int64_t attended() const { return num_heads * head_dim; }
  int64_t qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

struct Given {
  const Tensor& residual;
  const Tensors &weights, &norms, &head_norms, &biases, &k_caches, &v_caches;
  const Numbers& kinds;
  const Tensor &positions, &slot_mapping, &seq_lens, &block_table, &cos_sin;
};

struct Layer {
  Product qkv, o, gate_up, down;
  const float *attention_norm, *mlp_norm, *q_norm, *k_norm;
  void* caches[2];
};

// Takes the weights one after the other, in the order of layers.
class Weights {
 public:
  explicit Weights(const Given& given) : weights_(given.weights), kinds_(given.kinds) {
    if (weights_.size() != kinds_.size()) {
      fail(kOp, "kinds has ", kinds_.size(), " numbers for ", weights_.size(), " weights");
    }
  }

  bool in_blocks() const { return !at_end() && kinds_[next_] != kPlain; }
  bool at_end() const { return next_ >= weights_.size(); }
  int64_t rows() const { return weight().size(0); }

  // The next weight, checked.
  const Tensor& take(int64_t rows, int64_t columns, bool in_blocks) {
    const Tensor& taken = weight();
    const Arg arg(kOp, "one of weights", taken);
    arg.dim(2).last_contiguous().on_cpu().size(0, rows, "as the model's other sizes say");
    kind_ = kinds_[next_];
    if (in_blocks != (kind_ != kPlain)) fail(kOp, "a product has weights in blocks beside plain ones");
    if (!in_blocks) {
      arg.floating().size(1, columns, "as the model's other sizes say");
    } else {
      const BlockSize block = block_size(kOp, kind_);
      if (columns % block.values != 0) {
        fail(kOp, "a weight of ", columns, " columns cannot be in ", block.name, " blocks of ", block.values, " values");
      }
      arg.dtype({ScalarType::Byte}).size(1, columns / block.values * block.bytes, "blocks for the model's other sizes");
    }
    ++next_;
    return taken;
  }

  // Of the weight that was taken last.
  int64_t kind() const { return kind_; }

 private:
  const Tensor& weight() const {
    if (at_end()) fail(kOp, "weights has ", weights_.size(), " tensors, which is too few for its layers");
    return weights_[next_];
  }

  const Tensors& weights_;
  const Numbers& kinds_;
  size_t next_ = 0;
  int64_t kind_ = kPlain;
};

void check_lists(const Model& m, const Given& given) {
  const auto count = [&](const char* name, const Tensors& list, int64_t each, bool optional) {
    const int64_t size = static_cast<int64_t>(list.size());
    if (size == m.num_layers * each || (optional && size == 0)) return;
    fail(kOp, name, " has ", size, " tensors, must have ", each, " for each of ", m.num_layers, " layers");
  };
  count("norms", given.norms, 2, false);
  count("head_norms", given.head_norms, 2, true);
  count("biases", given.biases, 1, true);
  count("v_caches", given.v_caches, 1, false);
  const auto vectors = [&](const char* name, const Tensors& list, int64_t size) {
    for (const Tensor& vector : list) {
      Arg(kOp, name, vector).dtype({ScalarType::Float}).dim(1).size(0, size, "as the model's other sizes say");
      Arg(kOp, name, vector).contiguous().on_cpu();
    }
  };
  vectors("one of norms", given.norms, m.hidden);
  vectors("one of head_norms", given.head_norms, m.head_dim);
  vectors("one of biases", given.biases, m.qkv());
  for (const Tensors* caches : {&given.k_caches, &given.v_caches}) {
    const Tensor& first = (*caches)[0];
    for (const Tensor& cache : *caches) {
      const Arg arg(kOp, "one of the caches", cache);
      arg.dtype({ScalarType::Float}).dim(4).last_contiguous().on_cpu();
      for (int64_t d = 0; d < 4; ++d) {
        arg.size(d, given.k_caches[0].size(d), "as the first");
        if (cache.stride(d) != first.stride(d)) fail(kOp, "one of the caches has other strides than the first");
      }
    }
  }
}

void check_step(const Model& m, const Given& given) {
  const auto of_rows = [&](const char* name, const Tensor& tensor, ScalarType dtype, int64_t dim) {
    Arg(kOp, name, tensor).dtype({dtype}).dim(dim).size(0, m.rows, "the rows of residual").last_contiguous().on_cpu();
  };
  of_rows("positions", given.positions, ScalarType::Long, 1);
  of_rows("slot_mapping", given.slot_mapping, ScalarType::Long, 1);
  of_rows("seq_lens", given.seq_lens, ScalarType::Int, 1);
  of_rows("block_table", given.block_table, ScalarType::Int, 2);
  Arg(kOp, "cos_sin", given.cos_sin).dtype({ScalarType::Float}).dim(2).contiguous().on_cpu();
  const int64_t rotary_dim = given.cos_sin.size(1);
  if (rotary_dim % 2 != 0 || rotary_dim > m.head_dim) {
    fail(kOp, "cos_sin has ", rotary_dim, " columns, must be an even number of at most the head size, ", m.head_dim);
  }
  const int32_t* lens = given.seq_lens.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < m.rows; ++row) {
    if (lens[row] < 1) fail(kOp, "seq_lens[", row, "] is ", lens[row], ", must be at least 1");
    check_blocks(kOp, row, lens[row], given.block_table, given.k_caches[0]);
  }
}

// The sizes that the arguments say; the rest of them is checked to fit.
Model model_of(const Given& given) {
  Arg(kOp, "residual", given.residual).dtype({ScalarType::Float}).dim(2).last_contiguous().on_cpu();
  const int64_t num_layers = static_cast<int64_t>(given.k_caches.size());
  if (num_layers == 0) fail(kOp, "k_caches has no tensors, must have one for each layer");
  const Tensor& cache = given.k_caches[0];
  Arg(kOp, "one of the caches", cache).dim(4);
  Model m{given.residual.size(0), given.residual.size(1), 0, 0, cache.size(2), cache.size(3), num_layers};
  if (m.hidden == 0 || m.num_kv_heads == 0 || m.head_dim == 0 || cache.size(1) == 0) {
    fail(kOp, "residual has ", m.hidden, " columns and a block of the cache ", cache.size(1), " slots of ",
         m.num_kv_heads, " heads of ", m.head_dim, ", must all be at least 1");
  }
  // Weights of the first layer: q, k and v as one or three, o, gate and up as one or two.
  const size_t o = !given.kinds.empty() && given.kinds[0] != kPlain ? 3 : 1;
  if (given.weights.size() < o + 2 || given.kinds.size() != given.weights.size()) {
    fail(kOp, "weights has ", given.weights.size(), " tensors and kinds ", given.kinds.size(),
         " numbers, which is too few for a layer or not as many");
  }
  for (const size_t i : {size_t{0}, o + 1}) Arg(kOp, "one of weights", given.weights[i]).dim(2);
  const int64_t qkv = given.weights[0].size(0), gate_up = given.weights[o + 1].size(0);
  m.num_heads = qkv / m.head_dim - (o == 1 ? 2 * m.num_kv_heads : 0);
  m.width = given.kinds[o + 1] == kPlain ? gate_up / 2 : gate_up;
  if (m.num_heads < 1 || m.num_heads % m.num_kv_heads != 0) {
    fail(kOp, "weights are for ", m.num_heads, " heads of queries, must be a multiple of the ", m.num_kv_heads,
         " heads of the caches");
  }
  if (m.width < 1) fail(kOp, "gate and up have no rows, must have at least 1");
  return m;
}

// A step of one token a row through all layers: what the phases of a layer hand to the next, and how a piece of one is
// computed, by the kernels of the single operators.
class Step {
 public:
  Step(const Model& m, const Given& given, double eps, double scale, bool gelu_tanh)
      : m_(m), kernels_(cpu_kernels()), activation_(gelu_tanh ? Activation::kGeluTanh : Activation::kSilu),
        eps_(static_cast<float>(eps)), residual_(static_cast<float*>(given.residual.mutable_data_ptr())),
        residual_stride_(given.residual.stride(0)), normed_(m.rows, m.hidden), attended_(m.rows, m.attended()),
        activated_(m.rows, m.width), heads_(std::make_unique_for_overwrite<float[]>(m.rows * m.qkv())),
        delta_(std::make_unique_for_overwrite<float[]>(m.rows * m.hidden)),
        gate_up_(std::make_unique_for_overwrite<float[]>(m.rows * 2 * m.width)) {
    set_rope(given);
    set_attention(given, scale);
    set_layers(given);
    for (const Layer& layer : layers_) add_phases(layer);
    phases_.add(m_.rows);
  }

  void run() {
    const int64_t floats = attention_scratch(plan_.max_rows, m_.head_dim);
    std::vector<float> scratch(floats * threads_);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t, int64_t) {
      float* mine = scratch.data() + next.fetch_add(1) * floats;
      phases_.work([&](size_t phase, int64_t lane) { look_ahead(phase, lane); },
                   [&](size_t phase, int64_t piece) { run_piece(phase, piece, mine); });
    });
  }

 private:
  void set_rope(const Given& given) {
    const Tensor& k_cache = given.k_caches[0];
    float* k = heads_.get() + m_.attended();
    float* v = k + m_.num_kv_heads * m_.head_dim;
    rope_.dtype = DType::kFloat32;
    rope_.positions = checked_indices(kOp, "positions", given.positions, given.cos_sin.size(0));
    rope_.cos_sin = given.cos_sin.const_data_ptr<float>();
    rope_.rotary_dim = given.cos_sin.size(1);
    store_.slots = checked_indices(kOp, "slot_mapping", given.slot_mapping, k_cache.size(0) * k_cache.size(1));
    store_.num_heads = m_.num_kv_heads;
    store_.block_size = k_cache.size(1);
    store_.element_bytes = sizeof(float);
    store_.row_bytes = m_.head_dim * store_.element_bytes;
    float *rotated[2] = {heads_.get(), k}, *stored[2] = {k, v};
    for (int side = 0; side < 2; ++side) {
      const Tensor& cache = side == 0 ? k_cache : given.v_caches[0];
      rope_.x[side] = rotated[side];
      rope_.num_heads[side] = side == 0 ? m_.num_heads : m_.num_kv_heads;
      store_.src[side] = stored[side];
      rope_.token_stride[side] = store_.token_stride[side] = m_.qkv();
      rope_.head_stride[side] = store_.head_stride[side] = m_.head_dim;
      store_.block_stride[side] = cache.stride(0);
      store_.slot_stride[side] = cache.stride(1);
      store_.cache_head_stride[side] = cache.stride(2);
    }
  }

  void set_attention(const Given& given, double scale) {
    attention_.dtype = DType::kFloat32;
    attention_.q = heads_.get();
    attention_.q_token_stride = m_.qkv();
    attention_.q_head_stride = m_.head_dim;
    set_cache(attention_, given.k_caches[0], given.v_caches[0]);
    attention_.block_table = given.block_table.const_data_ptr<int32_t>();
    attention_.block_table_stride = given.block_table.stride(0);
    attention_.out = attended_.values();
    attention_.num_heads = m_.num_heads;
    attention_.head_dim = m_.head_dim;
    attention_.scale = static_cast<float>(scale);
    const int32_t* lens = given.seq_lens.const_data_ptr<int32_t>();
    std::vector<Sequence> sequences;
    for (int64_t row = 0; row < m_.rows; ++row) sequences.push_back({row, row, 1, lens[row]});
    plan_ = make_plan(attention_, sequences);
    partials_ = place_partials(attention_, plan_);
    first_unit_.resize(m_.rows + 1, static_cast<int64_t>(plan_.units.size()));
    for (int64_t i = static_cast<int64_t>(plan_.units.size()) - 1; i >= 0; --i) first_unit_[plan_.units[i].sequence] = i;
  }

  void set_layers(const Given& given) {
    Weights weights(given);
    layers_.resize(m_.num_layers);
    for (int64_t i = 0; i < m_.num_layers; ++i) {
      Layer& layer = layers_[i];
      const float* bias = given.biases.empty() ? nullptr : given.biases[i].const_data_ptr<float>();
      set_qkv(layer.qkv, weights, bias);
      set_product(layer.o, weights, attended_, m_.hidden, delta_.get());
      set_gate_up(layer.gate_up, weights);
      set_product(layer.down, weights, activated_, m_.hidden, delta_.get());
      layer.attention_norm = given.norms[2 * i].const_data_ptr<float>();
      layer.mlp_norm = given.norms[2 * i + 1].const_data_ptr<float>();
      const bool norms_heads = !given.head_norms.empty();
      layer.q_norm = norms_heads ? given.head_norms[2 * i].const_data_ptr<float>() : nullptr;
      layer.k_norm = norms_heads ? given.head_norms[2 * i + 1].const_data_ptr<float>() : nullptr;
      layer.caches[0] = given.k_caches[i].mutable_data_ptr();
      layer.caches[1] = given.v_caches[i].mutable_data_ptr();
    }
    if (!weights.at_end()) fail(kOp, "weights has ", given.weights.size(), " tensors, which is too many for its layers");
  }

  void set_product(Product& product, Weights& weights, const ProductInput& x, int64_t columns, float* out) {
    const bool in_blocks = weights.in_blocks();
    const Tensor& weight = weights.take(columns, x.size(), in_blocks);
    if (in_blocks) product.add_blocks(x, m_.rows, weight, weights.kind(), nullptr, out, columns);
    else product.set_plain(x, m_.rows, weight, nullptr, out);
  }

  void set_qkv(Product& product, Weights& weights, const float* bias) {
    if (!weights.in_blocks()) {
      return product.set_plain(normed_, m_.rows, weights.take(m_.qkv(), m_.hidden, false), bias, heads_.get());
    }
    const int64_t kv = m_.num_kv_heads * m_.head_dim;
    for (const int64_t columns : {m_.attended(), kv, kv}) {
      const Tensor& part = weights.take(columns, m_.hidden, true);
      product.add_blocks(normed_, m_.rows, part, weights.kind(), bias, heads_.get(), m_.qkv());
    }
  }

  void set_gate_up(Product& product, Weights& weights) {
    if (!weights.in_blocks()) {
      return product.set_plain(normed_, m_.rows, weights.take(2 * m_.width, m_.hidden, false), nullptr, gate_up_.get());
    }
    const Tensor& gate = weights.take(m_.width, m_.hidden, true);
    product.add_blocks(normed_, m_.rows, gate, weights.kind(), nullptr, activated_.values(), m_.width);
    const Tensor& up = weights.take(m_.width, m_.hidden, true);
    product.gate(up, weights.kind(), activation_);
  }

  static int64_t groups_together(const Product& product) { return product.gated() ? kGroupsTogether : 1; }

  int64_t pieces_of(const Product& product) const {
    const int64_t together = groups_together(product);
    return std::min((product.groups() + together - 1) / together, kPiecesPerThread * threads_);
  }

  // The group of columns that a piece of a product begins with; the pieces are of nearly the same size.
  int64_t first_group(const Product& product, int64_t piece) const {
    const int64_t together = groups_together(product), units = (product.groups() + together - 1) / together;
    return std::min(units * piece / pieces_of(product) * together, product.groups());
  }

  void add_phases(const Layer& layer) {
    phases_.add(m_.rows);
    phases_.add(pieces_of(layer.qkv));
    phases_.add(m_.rows);
    phases_.add(static_cast<int64_t>(plan_.units.size()));
    phases_.add(plan_.partial_floats > 0 || layer.o.in_blocks() ? m_.rows : 0);
    phases_.add(pieces_of(layer.o));
    phases_.add(m_.rows);
    phases_.add(pieces_of(layer.gate_up));
    phases_.add(layer.gate_up.gated() ? 0 : m_.rows);
    phases_.add(pieces_of(layer.down));
  }

  const Product* product_of(const Layer& layer, int64_t phase) const {
    switch (phase) {
      case kQkv: return &layer.qkv;
      case kO: return &layer.o;
      case kGateUp: return &layer.gate_up;
      case kDown: return &layer.down;
      default: return nullptr;
    }
  }

  // Ahead of a phase: the weights that the thread of a lane begins with in the product that comes next.
  void look_ahead(size_t number, int64_t lane) const {
    const size_t layer = number / kPhasesOfLayer;
    if (layer == layers_.size()) return;
    const Product* product = next_product(layers_[layer], static_cast<int64_t>(number % kPhasesOfLayer));
    if (product) product->prefetch(first_group(*product, phases_.first_of(lane, pieces_of(*product))));
  }

  static const Product* next_product(const Layer& layer, int64_t phase) {
    switch (phase) {
      case kAttentionNorm: return &layer.qkv;
      case kAttend: return &layer.o;
      case kMlpNorm: return &layer.gate_up;
      case kDown: return &layer.down;
      default: return nullptr;
    }
  }

  void run_piece(size_t number, int64_t piece, float* scratch) const {
    const size_t layer_number = number / kPhasesOfLayer;
    if (layer_number == layers_.size()) return add_delta(piece);
    const Layer& layer = layers_[layer_number];
    const int64_t phase = static_cast<int64_t>(number % kPhasesOfLayer);
    switch (phase) {
      case kAttentionNorm: return norm(piece, layer.attention_norm, layer_number > 0, layer.qkv.in_blocks());
      case kRope: return rope(piece, layer);
      case kAttend: return kernels_.attention(attention_of(layer), plan_.units[piece], scratch);
      case kMerge: return merge(piece, layer);
      case kMlpNorm: return norm(piece, layer.mlp_norm, true, layer.gate_up.in_blocks());
      case kActivate: return activate(piece, layer);
      default: return multiply(*product_of(layer, phase), piece, layer);
    }
  }

  void norm(int64_t row, const float* weight, bool adds, bool quantises) const {
    NormArgs args{};
    args.dtype = DType::kFloat32;
    args.x = adds ? delta_.get() : residual_;
    args.inner = 1;
    args.outer_stride = adds ? m_.hidden : residual_stride_;
    args.residual = adds ? residual_ : nullptr;
    args.residual_stride = residual_stride_;
    args.weight = weight;
    args.out = normed_.values();
    args.hidden = m_.hidden;
    args.eps = eps_;
    kernels_.rms_norm(args, row, row + 1);
    if (quantises) normed_.quantise(row, 0, m_.hidden);
  }

  void norm_heads(float* heads, int64_t count, const float* weight) const {
    NormArgs args{};
    args.dtype = DType::kFloat32;
    args.x = args.out = heads;
    args.inner = 1;
    args.outer_stride = args.hidden = m_.head_dim;
    args.weight = weight;
    args.eps = eps_;
    kernels_.rms_norm(args, 0, count);
  }

  void rope(int64_t row, const Layer& layer) const {
    float* heads = heads_.get() + row * m_.qkv();
    if (layer.q_norm) norm_heads(heads, m_.num_heads, layer.q_norm);
    if (layer.k_norm) norm_heads(heads + m_.attended(), m_.num_kv_heads, layer.k_norm);
    kernels_.rotary(rope_, row, row + 1);
    StoreArgs store = store_;
    for (int side = 0; side < 2; ++side) store.cache[side] = layer.caches[side];
    kernels_.store_kv(store, row, row + 1);
  }

  AttentionArgs attention_of(const Layer& layer) const {
    AttentionArgs args = attention_;
    args.k_cache = layer.caches[0];
    args.v_cache = layer.caches[1];
    return args;
  }

  void merge(int64_t row, const Layer& layer) const {
    for (int64_t i = first_unit_[row]; i < first_unit_[row + 1]; ++i) {
      if (plan_.splits[i] > 1) kernels_.merge(attention_, plan_.units[i], plan_.splits[i]);
    }
    if (layer.o.in_blocks()) attended_.quantise(row, 0, m_.attended());
  }

  void activate(int64_t row, const Layer& layer) const {
    const GatedArgs args{DType::kFloat32, activation_, gate_up_.get(), 2 * m_.width, activated_.values(), m_.width};
    kernels_.gated(args, row, row + 1);
    if (layer.down.in_blocks()) activated_.quantise(row, 0, m_.width);
  }

  void multiply(const Product& product, int64_t piece, const Layer& layer) const {
    const int64_t begin = first_group(product, piece), end = first_group(product, piece + 1);
    product.run(begin, end);
    if (!product.gated() || !layer.down.in_blocks()) return;
    const int64_t column = begin * kLinearColumns, columns = std::min(end * kLinearColumns, m_.width) - column;
    for (int64_t row = 0; row < m_.rows; ++row) activated_.quantise(row, column, columns);
  }

  // What the last layer has left to the residual stream.
  void add_delta(int64_t row) const {
    float* to = residual_ + row * residual_stride_;
    const float* from = delta_.get() + row * m_.hidden;
    for (int64_t i = 0; i < m_.hidden; ++i) to[i] += from[i];
  }

  const Model m_;
  const CpuKernels& kernels_;
  const Activation activation_;
  const float eps_;
  float* const residual_;
  const int64_t residual_stride_;
  ProductInput normed_, attended_, activated_;
  std::unique_ptr<float[]> heads_, delta_, gate_up_;
  RotaryArgs rope_{};
  StoreArgs store_{};
  AttentionArgs attention_{};
  AttentionPlan plan_;
  std::vector<float> partials_;
  std::vector<int64_t> first_unit_;  // of each row, and behind the last
  std::vector<Layer> layers_;
  const int64_t threads_ = torch::stable::get_num_threads();
  Phases phases_{threads_};
};

void decode_layers(Tensor residual, Tensors weights, Numbers kinds, Tensors norms, Tensors head_norms, Tensors biases,
                   Tensors k_caches, Tensors v_caches, Tensor positions, Tensor slot_mapping, Tensor seq_lens,
                   Tensor block_table, Tensor cos_sin, double eps, double scale, bool gelu_tanh) {
  const Given given{residual, weights,   norms,        head_norms, biases,      k_caches, v_caches,
                    kinds,    positions, slot_mapping, seq_lens,   block_table, cos_sin};
  const Model model = model_of(given);
  if (model.rows == 0) return;
  check_lists(model, given);
  check_step(model, given);
  Step(model, given, eps, scale, gelu_tanh).run();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("decode_layers", TORCH_BOX(&decode_layers)); }

}  // namespace raylm
