#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

void store_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, double k_scale,
              double v_scale) {
  const char* op = "store_kv";
  check_store(op, k, v, k_cache, v_cache, slot_mapping);
  check_scales(op, k_cache, k_scale, v_scale);
  Arg(op, "k", k).on_cpu();
  Arg(op, "v", v).on_cpu();
  Arg(op, "k_cache", k_cache).on_cpu();
  Arg(op, "v_cache", v_cache).on_cpu();
  Arg(op, "slot_mapping", slot_mapping).on_cpu();
  const StoreArgs args = store_args(op, k, v, k_cache, v_cache, slot_mapping);
  const int64_t cost = 2 * k.size(1) * k.size(2);
  for_range(k.size(0), cost, [&](int64_t begin, int64_t end) { cpu_kernels().store_kv(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("store_kv", TORCH_BOX(&store_kv)); }

}  // namespace raylm
