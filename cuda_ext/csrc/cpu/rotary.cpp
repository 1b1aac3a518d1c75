#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

void rotary(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const char* op = "rotary";
  check_rotary(op, q, k, positions, cos_sin);
  Arg(op, "q", q).on_cpu();
  Arg(op, "k", k).on_cpu();
  Arg(op, "positions", positions).on_cpu();
  Arg(op, "cos_sin", cos_sin).on_cpu();
  const RotaryArgs args = rotary_args(op, q, k, positions, cos_sin);
  const int64_t cost = (q.size(1) + k.size(1)) * args.rotary_dim;
  for_range(q.size(0), cost, [&](int64_t begin, int64_t end) { cpu_kernels().rotary(args, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("rotary", TORCH_BOX(&rotary)); }

}  // namespace raylm
