#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

// The norm of the heads of q or k, in place.
void norm_heads(const Tensor& x, const Tensor& weight, double eps, int64_t token) {
  const int64_t size = static_cast<int64_t>(x.element_size());
  NormArgs args{};
  args.dtype = dtype_of(x);
  args.weight = weight.const_data_ptr();
  args.inner = 1;
  args.hidden = x.size(2);
  args.eps = static_cast<float>(eps);
  for (int64_t head = 0; head < x.size(1); ++head) {
    args.out = static_cast<char*>(x.mutable_data_ptr()) + (token * x.stride(0) + head * x.stride(1)) * size;
    args.x = args.out;
    cpu_kernels().rms_norm(args, 0, 1);
  }
}

void rope_store(Tensor q, Tensor k, Tensor v, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                double eps, Tensor positions, Tensor cos_sin, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
                bool /*frozen*/, double k_scale, double v_scale) {
  const char* op = "rope_store";
  check_rope_store(q, k, v, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, slot_mapping);
  check_scales(op, k_cache, k_scale, v_scale);
  const std::pair<const char*, const Tensor*> all[] = {
      {"q", &q},
      {"k", &k},
      {"v", &v},
      {"q_weight", q_weight ? &*q_weight : nullptr},
      {"k_weight", k_weight ? &*k_weight : nullptr},
      {"positions", &positions},
      {"cos_sin", &cos_sin},
      {"k_cache", &k_cache},
      {"v_cache", &v_cache},
      {"slot_mapping", &slot_mapping},
  };
  for (const auto& [name, tensor] : all) {
    if (tensor) Arg(op, name, *tensor).on_cpu();
  }
  const RotaryArgs rotary = rotary_args(op, q, k, positions, cos_sin);
  const StoreArgs store = store_args(op, k, v, k_cache, v_cache, slot_mapping);
  const int64_t cost = (q.size(1) + 2 * k.size(1)) * q.size(2) * 2;
  for_range(q.size(0), cost, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (q_weight) norm_heads(q, *q_weight, eps, token);
      if (k_weight) norm_heads(k, *k_weight, eps, token);
      cpu_kernels().rotary(rotary, token, token + 1);
      cpu_kernels().store_kv(store, token, token + 1);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("rope_store", TORCH_BOX(&rope_store)); }

}  // namespace raylm
